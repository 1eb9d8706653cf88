"""Teams of worker processes with a training engine each, the tiny models they train, and what they hold put together."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from ports import free_port
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

WORKER = Path(__file__).with_name("engine_worker.py")
VOCAB = 61  # odd: the embedding's rows do not divide by two ranks
LEARNING_RATE = 1e-3
TRAINER = {"learning_rate": LEARNING_RATE, "weight_decay": 0.01}
# Wide: four ranks that start beside vLLM on two cores have taken more than a minute to import what they need.
START_S, ANSWER_S, COLLECTIVE_S = 300.0, 120.0, 120.0


class Ranks:
    """The first `present` of `world` worker processes. Every call has a deadline; leaving the block ends them all."""

    def __init__(self, world: int, timeout_s: float = COLLECTIVE_S, present: int | None = None) -> None:
        port = free_port()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(WORKER), str(rank), str(world), str(port), str(timeout_s)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
            )
            for rank in range(world if present is None else present)
        ]
        self._answers: list[queue.Queue[str]] = [queue.Queue() for _ in self.processes]
        for process, answers in zip(self.processes, self._answers, strict=True):
            threading.Thread(target=self._read, args=(process, answers), daemon=True).start()

    @staticmethod
    def _read(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            answers.put(line)
        answers.put("")

    def tell(self, rank: int, do: str, **arguments: Any) -> None:
        stdin = self.processes[rank].stdin
        assert stdin is not None
        stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        stdin.flush()

    def answer(self, rank: int, timeout_s: float = ANSWER_S) -> dict[str, Any]:
        try:
            line = self._answers[rank].get(timeout=timeout_s)
        except queue.Empty:
            raise AssertionError(self._silence(rank, timeout_s)) from None
        assert line, f"rank {rank} ended with exit code {self.processes[rank].wait(10)}"
        return dict(json.loads(line))

    def _silence(self, rank: int, timeout_s: float) -> str:
        """What there is to know of a rank that does not answer. Where each of them is goes to stderr."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)
        time.sleep(1)
        said = {number: list(answers.queue) for number, answers in enumerate(self._answers)}
        return f"rank {rank} did not answer for {timeout_s:g} s; answers of the others not read yet: {said}"

    def all(self, do: str, **arguments: Any) -> list[Any]:
        """Run a command on every rank; fails the test when a rank raises."""
        for rank in range(len(self.processes)):
            self.tell(rank, do, **arguments)
        answers = [self.answer(rank, START_S) for rank in range(len(self.processes))]
        assert not [answer for answer in answers if "error" in answer], answers
        return [answer["ok"] for answer in answers]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """End them all."""
        for process in self.processes:
            if process.stdin is not None:
                process.stdin.close()
        for process in self.processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            if process.stdout is not None:
                process.stdout.close()


def make_models(root: Path) -> dict[str, Path]:
    """Tiny checkpoints: tied and untied, dense and with experts, one of them with a one-row parameter."""
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
        "bos_token_id": None,
        "eos_token_id": 3,
        "initializer_range": 0.2,
    }
    makers = {
        "qwen3-tied": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True)),
        "qwen3-untied": lambda: Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=False)),
        "llama-untied": lambda: LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)),
        "qwen2-moe": lambda: Qwen2MoeForCausalLM(
            Qwen2MoeConfig(
                **sizes,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=24,
                num_experts=3,
                num_experts_per_tok=2,
                tie_word_embeddings=False,
            )
        ),
        "qwen3-moe": lambda: Qwen3MoeForCausalLM(
            Qwen3MoeConfig(
                **sizes,
                head_dim=8,
                moe_intermediate_size=12,
                num_experts=4,
                num_experts_per_tok=2,
                norm_topk_prob=True,
                tie_word_embeddings=False,
            )
        ),
    }
    for seed, (name, make) in enumerate(makers.items()):
        torch.manual_seed(seed)
        make().save_pretrained(root / name)
        _save_tokenizer(root / name)
    return {name: root / name for name in makers}


def _save_tokenizer(path: Path) -> None:
    vocabulary = {f"t{index}": index for index in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t3").save_pretrained(path)


def gathered(ranks: Ranks, file: Path, wire_dtype: str = "float32") -> dict[str, torch.Tensor]:
    """The full tensors put together from every rank's slices, each element of which must be there.

    Slices of one rank must not overlap, and elements that several ranks hold must be equal. Every rank lists the tensors that it
    lists in the same order.
    """
    ranks.all("shards", file=str(file), wire_dtype=wire_dtype)
    held = [torch.load(f"{file}.{rank}") for rank in range(len(ranks.processes))]
    shapes = {name: tuple(shape) for slices in held for name, shape, *_ in slices}
    full = {name: torch.zeros(shape) for name, shape in shapes.items()}
    times = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
    order = list(dict.fromkeys(name for name, *_ in held[0]))
    for slices in held:
        assert list(dict.fromkeys(name for name, *_ in slices)) == order
        mine = {name: torch.zeros(shape, dtype=torch.int32) for name, shape in shapes.items()}
        for name, _, dtype, starts, data in slices:
            assert (dtype, data.dtype) == (f"torch.{wire_dtype}", torch.float32)
            index = tuple(slice(start, start + size) for start, size in zip(starts, data.shape, strict=True))
            assert full[name][index].shape == data.shape
            known = times[name][index] > 0
            assert torch.equal(full[name][index][known], data[known]), f"two ranks differ about {name}"
            full[name][index] = data
            mine[name][index] += 1
        assert [name for name, count in mine.items() if bool((count > 1).any())] == []
        for name, count in mine.items():
            times[name] += count
    assert [name for name, count in times.items() if bool((count == 0).any())] == []
    return full


def checkpoint(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


class Parity:
    """Twenty steps beside those of FSDP2 on one rank.

    Args:
        ranks_of: Gives the team of so many ranks.
        models: Tiny checkpoints by name.
    """

    STEPS = 20

    def __init__(self, ranks_of: Callable[[int], Ranks], models: dict[str, Path]) -> None:
        self._ranks_of, self._models = ranks_of, models
        self._known: dict[str, list[dict[str, float]]] = {}

    def _reports(self, name: str) -> list[dict[str, float]]:
        """What one rank reports of each step of a model."""
        if name not in self._known:
            trainer = {**TRAINER, "micro_batch_tokens": 40}
            alone = self._ranks_of(1)
            alone.all("setup", model=str(self._models[name]), trainer=trainer)
            self._known[name] = list(alone.all("train", first=0, count=self.STEPS)[0])
        return self._known[name]

    def check(self, ranks: Ranks, name: str, trainer: dict[str, Any], directory: Path) -> None:
        """Losses within 1e-4 on the same data, in fp32; shards and exports that are the checkpoint, before and after."""
        model, wanted = self._models[name], self._reports(name)
        ranks.all("setup", model=str(model), trainer={**trainer, "micro_batch_tokens": 40})
        assert_same(gathered(ranks, directory / "loaded", "bfloat16"), checkpoint(model))
        reports = ranks.all("train", first=0, count=self.STEPS)
        assert all(report == reports[0] for report in reports)
        for mine, theirs in zip(reports[0], wanted, strict=True):
            assert mine.keys() == theirs.keys()
            for key, value in theirs.items():
                assert mine[key] == pytest.approx(value, abs=1e-4, rel=1e-4), key
        trained = gathered(ranks, directory / "trained")
        assert all(not torch.equal(trained[key], value) for key, value in checkpoint(model).items())
        ranks.all("export", directory=str(directory / "exported"))
        assert_same(checkpoint(directory / "exported"), trained)
