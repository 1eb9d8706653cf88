"""The whole hop on real parts: two FSDP2 ranks, every engine, real vLLM; parameters bit for bit, tokens exactly.

`test_stock_vllm.py` holds the same of further architectures and data types, without the trainer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import add_tokenizer, greedy_tokens, is_greedy, load_tensors, make_llama, make_qwen3, vllm_parameters
from tiny_run import IN_ENGINE
from trainer_ranks import Trainers
from waiting import HANG_S

from weightlane.rollout import Completion, RolloutConfig, RolloutWorker
from weightlane.sync import Coordinator, Rendezvous, SyncConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

RANKS = 2
PROMPT = [5, 6, 7]
VOCAB = 300
"""Needs padding in vLLM, and gives each of two trainer ranks an uneven part of a fused tensor."""


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    started = Trainers(RANKS)
    yield started
    started.close()


@pytest.fixture(
    params=[
        ("qwen3", True, "float32", (1, 2)),
        pytest.param(("llama", False, "bfloat16", (2,)), marks=pytest.mark.exhaustive),
    ],
    ids=lambda case: f"{case[0]}-{'tied' if case[1] else 'untied'}-{case[2]}",
)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str, tuple[int, ...]]:
    """A model, the data type in which it is served, and the ranks of each replica."""
    architecture, tied, dtype, worlds = request.param
    make = {"qwen3": make_qwen3, "llama": make_llama}[architecture]
    model = make(tmp_path / "model", seed=3, tied=tied, dtype=getattr(torch, dtype), vocab=VOCAB)
    add_tokenizer(model, VOCAB)
    return model, dtype, worlds


def make_worker(name: str, world: int, model: Path, dtype: str) -> RolloutWorker:
    extra = {"worker_extension_cls": "probe_extension.ProbeExtension"}
    if world == 1:
        extra["distributed_executor_backend"] = IN_ENGINE
    config = RolloutConfig(
        tensor_parallel=world,
        dtype=dtype,
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
        extra_engine_args=extra,
    )
    return RolloutWorker(name, config, model)


def test_after_every_sync_every_rollout_holds_and_computes_exactly_what_the_trainer_has(
    case: tuple[Path, str, tuple[int, ...]], trainers: Trainers, tmp_path: Path
) -> None:
    """Replicas of one rank and of two take every version at once."""
    model, dtype, worlds = case
    trainers.call("setup", str(model))
    workers = [make_worker(f"rollout-{world}", world, model, dtype) for world in worlds]
    environment = dict(os.environ)
    with asyncio.Runner() as runner:
        try:
            runner.run(_together(*(worker.start() for worker in workers)))
            # Other tests of the session must not find what a replica's own process sets.
            os.environ.clear()
            os.environ.update(environment)
            runner.run(_all_engines(trainers, workers, dtype, tmp_path))
        finally:
            runner.run(_together(*(worker.close() for worker in workers)))


async def _together(*calls: Coroutine[Any, Any, None]) -> None:
    await asyncio.gather(*calls)


async def _all_engines(trainers: Trainers, workers: Sequence[RolloutWorker], dtype: str, tmp_path: Path) -> None:
    placements = trainers.call("placement", dtype)
    version = 0
    # Two versions in a row over one connection, and one over each of two new ones.
    for backend, versions in (("gloo", 2), ("shm", 1), ("filesystem", 1)):
        options = {"path": str(tmp_path / "store")} if backend == "filesystem" else {}
        rendezvous = Rendezvous.host()
        address = rendezvous.address.to_plain()
        trainers.call("connect", address, backend, options, dtype, placements, "none")
        for worker in workers:
            await worker.connect(address, backend, options)
        coordinator = Coordinator(rendezvous, trainers.names, workers, SyncConfig(deadline_s=HANG_S, quorum=1.0))
        await coordinator.connect()
        for _ in range(versions):
            version += 1
            assert trainers.call("train", version) == [version] * RANKS
            exported = tmp_path / f"export-{version}"
            trainers.call("export", str(exported))
            tokens = [worker.clock.tokens for worker in workers]
            serving = [asyncio.create_task(_serve_until(worker, version)) for worker in workers]
            while any(worker.clock.tokens < before + 10 for worker, before in zip(workers, tokens, strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            trainers.call("publish", version)
            await coordinator.sync(version)
            for worker, completions in zip(workers, serving, strict=True):
                await _check_parameters(worker, exported, dtype)
                served = await completions
                if dtype == "float32":
                    await _check_tokens(worker, exported, version, served)
        coordinator.close()


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

    async def chain(length: int) -> list[Completion]:
        completions: list[Completion] = []
        while not completions or completions[-1].versions[-1] < version:
            completions.append(await worker.generate("in-flight", PROMPT, length, greedy=True))
        return completions

    # Of different lengths, so that one of them is certainly in flight when the version commits.
    return [completion for done in await asyncio.gather(chain(170), chain(230)) for completion in done]


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
