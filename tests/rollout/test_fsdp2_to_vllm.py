"""The whole hop on real parts: two FSDP2 ranks, every engine, real vLLM; parameters bit for bit, tokens exactly."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import greedy_tokens, is_greedy, load_tensors, make_llama, make_qwen3, vllm_parameters

from weightlane.rollout import Completion, RolloutConfig, RolloutWorker
from weightlane.sync import Coordinator, Rendezvous, SyncConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROGRAM = str(Path(__file__).with_name("trainer_process.py"))
RANKS = 2
PROMPT = [5, 6, 7]


class Trainers:
    """Two trainer ranks in processes of their own, called at the same time: most of their calls are collective."""

    def __init__(self, children: Any, model: Path, port: int) -> None:
        self._children = [
            children.start(
                [PROGRAM, json.dumps({"rank": rank, "world": RANKS, "port": port, "model": str(model)})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
            for rank in range(RANKS)
        ]
        assert self._answers() == ["ready"] * RANKS

    def call(self, method: str, *arguments: Any) -> list[Any]:
        for child in self._children:
            child.stdin.write(json.dumps([method, *arguments]) + "\n")
            child.stdin.flush()
        return self._answers()

    def _answers(self) -> list[Any]:
        return [json.loads(child.stdout.readline()) for child in self._children]


@pytest.fixture(
    params=[
        (1, "qwen3", True, "float32"),
        (1, "llama", False, "float32"),
        (1, "llama", True, "bfloat16"),
        (1, "qwen3", False, "bfloat16"),
        (2, "qwen3", False, "float32"),
        (2, "llama", True, "float32"),
        (2, "qwen3", True, "bfloat16"),
        (2, "llama", False, "bfloat16"),
    ],
    ids=lambda case: f"tp{case[0]}-{case[1]}-{'tied' if case[2] else 'untied'}-{case[3]}",
)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[int, Path, str]]:
    world, architecture, tied, dtype = request.param
    make = {"qwen3": make_qwen3, "llama": make_llama}[architecture]
    environment = dict(os.environ)
    # A vocabulary that needs padding in vLLM, and 75 rows a rank when two trainer ranks share 3 * 50.
    model = make(tmp_path / "model", seed=3, tied=tied, dtype=getattr(torch, dtype), vocab=300)
    _add_tokenizer(model)
    yield world, model, dtype
    os.environ.clear()
    os.environ.update(environment)


def _add_tokenizer(model: Path) -> None:
    """Training engines ask for a tokenizer that fits the model."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(300)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w298", pad_token="w299").save_pretrained(model)


def test_after_every_sync_the_rollout_holds_and_computes_exactly_what_the_trainer_has(
    case: tuple[int, Path, str], children: Any, free_port: int, tmp_path: Path
) -> None:
    world, model, dtype = case
    trainers = Trainers(children, model, free_port)
    config = RolloutConfig(
        tensor_parallel=world,
        dtype=dtype,
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
        extra_engine_args={"worker_extension_cls": "probe_extension.ProbeExtension"},
    )
    worker = RolloutWorker("rollout-0", config, model)
    with asyncio.Runner() as runner:
        try:
            runner.run(worker.start())
            runner.run(_all_engines(trainers, worker, dtype, tmp_path))
        finally:
            runner.run(worker.close())
    trainers.call("close")


async def _all_engines(trainers: Trainers, worker: RolloutWorker, dtype: str, tmp_path: Path) -> None:
    specs = max(trainers.call("specs", dtype), key=len)
    version = 0
    for backend in ("gloo", "shm", "filesystem"):
        options = {"path": str(tmp_path / "store")} if backend == "filesystem" else {}
        rendezvous = Rendezvous.host()
        address = rendezvous.address.to_plain()
        trainers.call("connect", address, backend, options, dtype, specs)
        await worker.connect(address, backend, options)
        names = [f"trainer-{rank}" for rank in range(RANKS)]
        coordinator = Coordinator(rendezvous, names, [worker], SyncConfig(deadline_s=30.0))
        await coordinator.connect()
        for _ in range(2):
            version += 1
            assert trainers.call("train", version) == [version] * RANKS
            exported = tmp_path / f"export-{version}"
            trainers.call("export", str(exported))
            serving = asyncio.create_task(_serve_until(worker, version))
            trainers.call("publish", version)
            await coordinator.sync(version)
            await _check_parameters(worker, exported, dtype)
            completions = await serving
            if dtype == "float32":
                await _check_tokens(worker, exported, version, completions)
        coordinator.close()
        assert not list(tmp_path.rglob("*.bin")) or backend == "filesystem"


async def _check_parameters(worker: RolloutWorker, exported: Path, dtype: str) -> None:
    tensors = {name: tensor.to(getattr(torch, dtype)) for name, tensor in load_tensors(exported).items()}
    world = worker.config.tensor_parallel
    for rank, live in enumerate(await worker._engine.collective_rpc("probe_parameters")):
        wanted = vllm_parameters(tensors, rank=rank, world=world)
        assert live.keys() == wanted.keys()
        for name, tensor in wanted.items():
            raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
            assert live[name] == [str(tensor.dtype), list(tensor.shape), raw], f"{name} on rank {rank}"


async def _serve_until(worker: RolloutWorker, version: int) -> list[Completion]:
    """Keep two requests in flight until both have tokens of `version`; all completions in order."""

    async def chain() -> list[Completion]:
        completions: list[Completion] = []
        while not completions or completions[-1].versions[-1] < version:
            completions.append(await worker.generate("in-flight", PROMPT, 300, greedy=True))
        return completions

    return [completion for done in await asyncio.gather(chain(), chain()) for completion in done]


async def _check_tokens(worker: RolloutWorker, exported: Path, version: int, completions: Sequence[Completion]) -> None:
    fresh = await worker.generate("fresh", PROMPT, 16, greedy=True)
    assert fresh.versions == [version] * 16
    assert fresh.token_ids == greedy_tokens(exported, PROMPT, 16)
    spanning = [completion for completion in completions if completion.versions[0] < version == completion.versions[-1]]
    assert spanning, "no request was in flight over the commit"
    for completion in spanning:
        # It goes on under the new weights, with all its context recomputed, exactly where its stamps change.
        boundary = completion.versions.index(version)
        before, after = completion.token_ids[:boundary], completion.token_ids[boundary:]
        assert is_greedy(exported, [*PROMPT, *before], after)
