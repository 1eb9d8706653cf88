"""`Fsdp2Engine` in real processes over gloo, against single-process transformers and AdamW."""

from __future__ import annotations

import functools
import json
import os
import queue
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.config import AlgorithmConfig, TrainerConfig
from weightlane.trainer.fsdp2 import Fsdp2Engine
from weightlane.trainer.fsdp2_parts import PARTS

WORKER = Path(__file__).with_name("fsdp2_worker.py")
VOCAB = 61  # odd: the embedding's rows do not divide by two ranks
LEARNING_RATE = 1e-3
STEPS = 3
START_S, ANSWER_S = 120.0, 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Ranks:
    """The first `present` of `world` worker processes. Every call has a deadline; leaving the block ends them all."""

    def __init__(self, world: int, timeout_s: float = 60.0, present: int | None = None) -> None:
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
        line = self._answers[rank].get(timeout=timeout_s)
        assert line, f"rank {rank} ended with exit code {self.processes[rank].wait(10)}"
        return dict(json.loads(line))

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


RanksOf = Callable[[int], Ranks]


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[RanksOf]:
    """Workers by their number, started once for the whole module: starting them is what takes time."""
    with ExitStack() as stack:
        yield functools.cache(lambda world: stack.enter_context(Ranks(world)))


@pytest.fixture(params=[1, 2], ids=["world1", "world2"])
def ranks(request: pytest.FixtureRequest, ranks_of: RanksOf) -> Ranks:
    return ranks_of(request.param)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny checkpoints: tied and untied, three architectures, one of them with fused experts and a one-row parameter."""
    root = tmp_path_factory.mktemp("models")
    sizes: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
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
    """The full tensors put together from every rank's shards, after checking that each element came exactly once."""
    ranks.all("shards", file=str(file), wire_dtype=wire_dtype)
    shards = [torch.load(f"{file}.{rank}") for rank in range(len(ranks.processes))]
    shapes = {name: tuple(shape) for part in shards for name, shape, *_ in part}
    full = {name: torch.zeros(shape).view(-1) for name, shape in shapes.items()}
    times = {name: torch.zeros(flat.shape, dtype=torch.int32) for name, flat in full.items()}
    for part in shards:
        assert len({name for name, *_ in part}) == len(part)
        for name, _, dtype, start, data, contiguous in part:
            assert (dtype, data.dtype, data.ndim, contiguous) == (f"torch.{wire_dtype}", torch.float32, 1, True)
            full[name][start : start + data.numel()] = data
            times[name][start : start + data.numel()] += 1
    assert all(bool((count == 1).all()) for count in times.values())
    return {name: flat.view(shapes[name]) for name, flat in full.items()}


def checkpoint(path: Path) -> dict[str, torch.Tensor]:
    return load_file(path / "model.safetensors")


def assert_same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> None:
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


def reference(path: Path, loss: str, steps: int, rows: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights of plain transformers and AdamW on the same batches.

    One sample at a time, with GRPO and supervised loss written out, so that nothing of ours but the samples is used.
    """
    make_batch = runpy.run_path(str(WORKER))["make_batch"]
    algorithm = AlgorithmConfig()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    losses, norms = [], []
    for step in range(steps):
        batch = make_batch(step, rows, VOCAB)
        total = torch.zeros(())
        for sample in batch.samples:
            ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
            start = len(sample.prompt_ids)
            logits = model(ids, use_cache=False).logits[0, start - 1 : -1] / batch.temperature
            logprobs = torch.log_softmax(logits, -1)[torch.arange(len(sample.completion_ids)), ids[0, start:]]
            if loss == "sft":
                total = total - logprobs.sum()
                continue
            ratio = torch.exp(logprobs - torch.tensor(sample.rollout_logprobs))
            clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * sample.advantage
            total = total - torch.minimum(ratio.clamp(max=algorithm.ratio_cap) * sample.advantage, clipped).sum()
        mean = total / batch.loss_tokens
        optimizer.zero_grad()
        mean.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(mean.detach()))
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return losses, norms, weights


TRAINER = {"learning_rate": LEARNING_RATE, "weight_decay": 0.01}


@pytest.mark.parametrize(
    ("name", "loss", "rows", "extra"),
    [
        ("qwen3-tied", "grpo", 6, {}),
        ("qwen3-untied", "sft", 5, {"micro_batch_tokens": 20}),
        ("llama-untied", "grpo", 7, {"micro_batch_tokens": 30, "activation_checkpointing": True}),
        ("llama-untied", "grpo", 1, {"reshard_after_forward": False}),  # with two ranks, one has nothing but padding
    ],
    ids=["whole batch", "micro batches", "recomputation", "idle rank"],
)
def test_training_equals_plain_transformers_and_adamw(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path, name: str, loss: str, rows: int, extra: dict[str, Any]
) -> None:
    ranks.all("setup", model=str(models[name]), trainer={**TRAINER, **extra})
    reports = ranks.all("train", first=0, count=STEPS, rows=rows, loss=loss)
    losses, norms, weights = reference(models[name], loss, STEPS, rows)
    assert all(report == reports[0] for report in reports)
    assert [report["loss"] for report in reports[0]] == pytest.approx(losses, abs=1e-5)
    assert [report["norm"] for report in reports[0]] == pytest.approx(norms, rel=1e-4)
    trained = gathered(ranks, tmp_path / "shards")
    assert trained.keys() == weights.keys()
    for key, tensor in trained.items():
        torch.testing.assert_close(tensor, weights[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen3-untied", "llama-untied", "qwen2-moe"])
def test_shards_of_all_ranks_are_the_checkpoint_bit_for_bit(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Names as on disk: tied tensors once, fused experts one by one."""
    ranks.all("setup", model=str(models[name]))
    assert_same(gathered(ranks, tmp_path / "shards", "bfloat16"), checkpoint(models[name]))


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-moe"])
def test_export_loads_in_transformers_with_the_trained_weights(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path, name: str
) -> None:
    ranks.all("setup", model=str(models[name]), trainer={**TRAINER, "compute_dtype": "bfloat16"})
    ranks.all("train", first=0, count=1)
    out = tmp_path / "exported"
    ranks.all("export", directory=str(out))
    trained = gathered(ranks, tmp_path / "shards")
    assert_same(checkpoint(out), trained)
    assert any(not torch.equal(trained[key], value) for key, value in checkpoint(models[name]).items())
    loaded = AutoModelForCausalLM.from_pretrained(out)
    start = AutoModelForCausalLM.from_pretrained(models[name])
    assert type(loaded) is type(start)
    assert loaded.dtype == torch.float32
    assert len(PreTrainedTokenizerFast.from_pretrained(out)) == VOCAB
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_bfloat16_compute_keeps_float32_master_weights_and_stays_close(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path
) -> None:
    reports = {}
    for dtype in ("float32", "bfloat16"):
        ranks.all("setup", model=str(models["qwen3-untied"]), trainer={**TRAINER, "compute_dtype": dtype})
        reports[dtype] = ranks.all("train", first=0, count=2, loss="sft")[0]
    exact, rounded = ([report["loss"] for report in reports[dtype]] for dtype in ("float32", "bfloat16"))
    assert rounded != exact
    assert rounded == pytest.approx(exact, rel=0.03)
    master = gathered(ranks, tmp_path / "shards", "bfloat16")["lm_head.weight"]
    assert not torch.equal(master, master.bfloat16().float())


def test_a_saved_run_continues_bit_for_bit_and_storage_never_moves(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path
) -> None:
    trainer = {**TRAINER, "lr_warmup_steps": 5}
    ranks.all("setup", model=str(models["qwen3-tied"]), trainer=trainer)
    addresses = ranks.all("shards", file=str(tmp_path / "first"))
    ranks.all("train", first=0, count=2)
    assert ranks.all("save", directory=str(tmp_path / "state")) == [2] * len(ranks.processes)
    drawn = ranks.all("draw")
    expected_reports = ranks.all("train", first=2, count=2)
    expected = gathered(ranks, tmp_path / "expected")
    # Back in the same engine, then in a fresh one.
    assert ranks.all("load", directory=str(tmp_path / "state")) == [2] * len(ranks.processes)
    assert ranks.all("train", first=2, count=2) == expected_reports
    assert_same(gathered(ranks, tmp_path / "again"), expected)
    assert ranks.all("shards", file=str(tmp_path / "last")) == addresses
    ranks.all("setup", model=str(models["qwen3-tied"]), trainer=trainer)
    ranks.all("draw")
    ranks.all("load", directory=str(tmp_path / "state"))
    assert ranks.all("draw") == drawn
    assert ranks.all("train", first=2, count=2) == expected_reports
    assert_same(gathered(ranks, tmp_path / "fresh"), expected)


def test_training_state_loads_with_another_number_of_ranks(
    ranks_of: RanksOf, models: dict[str, Path], tmp_path: Path
) -> None:
    one, two = ranks_of(1), ranks_of(2)
    two.all("setup", model=str(models["llama-untied"]), trainer=TRAINER)
    two.all("train", first=0, count=1)
    two.all("save", directory=str(tmp_path / "state"))
    one.all("setup", model=str(models["llama-untied"]), trainer=TRAINER)
    assert one.all("load", directory=str(tmp_path / "state")) == [1]
    assert_same(gathered(one, tmp_path / "one"), gathered(two, tmp_path / "two"))
    two.all("train", first=1, count=1)
    one.all("train", first=1, count=1)
    left, right = gathered(one, tmp_path / "one"), gathered(two, tmp_path / "two")
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-moe"])
def test_the_fence_names_every_checkpoint_tensor_once_and_before_it_changes(
    ranks: Ranks, models: dict[str, Path], name: str
) -> None:
    """The mixture of experts keeps its experts in fused parameters, each of which is several tensors of the checkpoint."""
    ranks.all("setup", model=str(models[name]), trainer=TRAINER)
    reports = ranks.all("fence")
    order = [[call["named"] for call in report["calls"]] for report in reports]
    assert all(parts == order[0] for parts in order)
    assert 1 < len(order[0]) <= PARTS
    named = [tensor for part in order[0] for tensor in part]
    assert sorted(named) == sorted(checkpoint(models[name]))
    for report in reports:
        assert report["published"] == [tensor for tensor in named if tensor in set(report["published"])]
        assert report["changed"] == report["published"]
        may_change: set[str] = set()
        for call in report["calls"]:
            assert set(call["changed_before"]) == may_change & set(report["published"])
            may_change |= set(call["named"])
        assert (report["error"], report["step"]) == ("", 1)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-moe"])
def test_a_step_in_parts_is_one_whole_step_bit_for_bit(ranks: Ranks, models: dict[str, Path], name: str) -> None:
    trainer = {**TRAINER, "lr_warmup_steps": 3, "max_grad_norm": 0.1}
    ranks.all("setup", model=str(models[name]), trainer=trainer)
    assert ranks.all("train_beside_one_whole_step", count=5) == [[[]] * 5] * len(ranks.processes)


def test_nothing_changes_when_the_fence_fails_at_once(ranks: Ranks, models: dict[str, Path]) -> None:
    ranks.all("setup", model=str(models["qwen3-untied"]), trainer=TRAINER)
    for report in ranks.all("fence", fail_at=0):
        assert report["changed"] == []
        assert (report["error"], report["step"]) == ("the fence failed.", 0)
    ranks.all("train", first=0, count=1)


def test_an_engine_between_two_steps_refuses_all_but_a_saved_state(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path
) -> None:
    ranks.all("setup", model=str(models["qwen3-untied"]), trainer=TRAINER)
    ranks.all("save", directory=str(tmp_path / "state"))
    expected = gathered(ranks, tmp_path / "expected")
    for report in ranks.all("fence", fail_at=2):
        assert 0 < len(report["changed"]) < len(report["published"])
        assert (report["error"], report["step"]) == ("the fence failed.", 0)
    for do, arguments in {
        "train": {"first": 0, "count": 1},
        "shards": {"file": str(tmp_path / "torn")},
        "save": {"directory": str(tmp_path / "torn")},
        "export": {"directory": str(tmp_path / "torn")},
    }.items():
        for rank in range(len(ranks.processes)):
            ranks.tell(rank, do, **arguments)
        for rank in range(len(ranks.processes)):
            assert "some parameters had changed" in ranks.answer(rank)["message"]
    ranks.all("load", directory=str(tmp_path / "state"))
    assert_same(gathered(ranks, tmp_path / "loaded"), expected)
    ranks.all("train", first=0, count=1)


def test_a_gradient_that_is_not_finite_changes_nothing_on_any_rank(ranks: Ranks, models: dict[str, Path]) -> None:
    ranks.all("setup", model=str(models["qwen3-untied"]), trainer=TRAINER)
    for report in ranks.all("overflow"):
        assert "gradient norm" in report["error"]
        assert not report["fence_called"]
        assert report["unchanged"]


def test_a_state_directory_is_never_overwritten_and_every_rank_says_so(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "taken").mkdir()
    ranks.all("setup", model=str(models["qwen3-tied"]))
    for do in ("save", "export"):
        for rank in range(len(ranks.processes)):
            ranks.tell(rank, do, directory=str(tmp_path / "taken"))
        for rank in range(len(ranks.processes)):
            answer = ranks.answer(rank)
            assert answer["error"] == "StorageError"
            assert "already exists" in answer["message"]
    assert list((tmp_path / "taken").iterdir()) == []


def test_a_disk_that_is_full_leaves_nothing_behind_and_the_engine_usable(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path
) -> None:
    """A limit on file sizes stands in for the disk: the same calls fail in the same way."""
    ranks.all("setup", model=str(models["qwen3-tied"]), trainer=TRAINER)
    ranks.all("limit_files", size=2000)
    for do in ("save", "export"):
        for rank in range(len(ranks.processes)):
            ranks.tell(rank, do, directory=str(tmp_path / do))
        for rank in range(len(ranks.processes)):
            answer = ranks.answer(rank)
            assert answer.get("error") == "StorageError", answer
            assert "could not be written" in answer["message"]
    assert list(tmp_path.iterdir()) == []
    ranks.all("limit_files", size=None)
    ranks.all("train", first=0, count=1)
    assert ranks.all("save", directory=str(tmp_path / "save")) == [1] * len(ranks.processes)


def test_a_dead_rank_is_reported_by_the_others_in_time(models: dict[str, Path]) -> None:
    with Ranks(2) as ranks:
        ranks.all("setup", model=str(models["qwen3-tied"]))
        ranks.processes[1].kill()
        ranks.processes[1].wait(10)
        began = time.monotonic()
        ranks.tell(0, "train", first=0, count=1)
        answer = ranks.answer(0)
        assert answer["error"] in {"PeerLostError", "TransportError"}, answer
        assert time.monotonic() - began < 30.0  # half the timeout: the loss itself was noticed
        ranks.tell(0, "close")
        assert ranks.answer(0) == {"ok": None}


def test_a_rank_that_never_comes_and_a_taken_port_are_typed_errors(models: dict[str, Path]) -> None:
    with Ranks(2, timeout_s=2.0, present=1) as ranks:
        ranks.tell(0, "setup", model=str(models["qwen3-tied"]))
        answer = ranks.answer(0, START_S)
        assert answer["error"] == "DeadlineExceededError"
        assert "trainer.collective_timeout_s" in answer["message"]
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            engine = Fsdp2Engine(TrainerConfig(device="cpu"), 0, 1, ("127.0.0.1", holder.getsockname()[1]))
            with pytest.raises(OSError, match="taken") as taken:
                engine.setup(models["qwen3-tied"], seed=0)
            assert type(taken.value).__name__ == "AddressInUseError"
            engine.close()


def test_weights_that_do_not_fit_their_config_are_refused(models: dict[str, Path], tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in models["qwen3-tied"].iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(
        json.dumps({**config, "num_hidden_layers": 3, "layer_types": ["full_attention"] * 3})
    )
    engine = Fsdp2Engine(TrainerConfig(device="cpu"), 0, 1, ("127.0.0.1", free_port()))
    with pytest.raises(ConfigError, match=r"missing keys model\.layers\.2"):
        engine.setup(broken, seed=0)
    engine.close()
