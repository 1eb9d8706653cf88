"""The whole hop on real parts: two FSDP2 ranks, every engine, real vLLM; parameters bit for bit, tokens exactly.

`test_stock_vllm.py` holds the same of further architectures and data types, without the trainer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest
import torch
from running_worker import PROMPT, RecordingWorker, probed_worker, started
from tiny_models import add_tokenizer, check_switch, greedy_tokens, load_tensors, make_llama, make_qwen3
from trainer_ranks import Trainers

from weightlane.rollout import Completion

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VOCAB = 300
"""Needs padding in vLLM, and gives each of two trainer ranks an uneven part of a fused tensor."""


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with closing(Trainers(2)) as ranks:
        yield ranks


@pytest.mark.parametrize(
    ("architecture", "dtype", "worlds"),
    [("qwen3-tied", "float32", (1, 2)), pytest.param("llama", "bfloat16", (2,), marks=pytest.mark.exhaustive)],
)
def test_after_every_sync_every_rollout_holds_and_computes_exactly_what_the_trainer_has(
    architecture: str, dtype: str, worlds: tuple[int, ...], trainers: Trainers, tmp_path: Path
) -> None:
    """Replicas of one rank and of two take every version at once."""
    make = {"qwen3-tied": make_qwen3, "llama": make_llama}[architecture]
    model = tmp_path / "export-0"
    make(model, seed=3, tied=architecture == "qwen3-tied", dtype=getattr(torch, dtype), vocab=VOCAB)
    add_tokenizer(model, VOCAB)
    trainers.call("setup", str(model))
    workers = [
        probed_worker(f"rollout-{world}", model, in_engine=world == 1, tensor_parallel=world, dtype=dtype)
        for world in worlds
    ]
    with started(*workers) as runner:
        # Two versions in a row over one connection, and one over each of two new ones.
        for engine, versions in (("gloo", (1, 2)), ("shm", (3,)), ("filesystem", (4,))):
            runner.run(_publish(trainers, workers, engine, versions, tmp_path, dtype))


async def _publish(
    trainers: Trainers,
    workers: Sequence[RecordingWorker],
    engine: str,
    versions: Sequence[int],
    folder: Path,
    dtype: str,
) -> None:
    async with trainers.publishing(workers, engine, folder / "store", dtype) as coordinator:
        for version in versions:
            assert trainers.call("train", version) == [version] * 2
            before, exported = folder / f"export-{version - 1}", folder / f"export-{version}"
            trainers.call("export", str(exported))
            counts = [worker.clock.tokens for worker in workers]
            serving = [asyncio.create_task(_serve_until(worker, version)) for worker in workers]
            while any(worker.clock.tokens < count + 10 for worker, count in zip(workers, counts, strict=True)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            trainers.call("publish", version)
            await coordinator.sync(version)
            for worker, completions in zip(workers, serving, strict=True):
                tensors = load_tensors(exported)
                await worker.check({name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()})
                served = await completions
                fresh = await worker.generate("fresh", PROMPT, 16, greedy=True)
                assert fresh.versions == [version] * 16
                spanning = [each for each in served if each.versions[0] < version == each.versions[-1]]
                assert spanning, "no request was in flight over the commit"
                if dtype == "float32":
                    assert fresh.token_ids == greedy_tokens(exported, PROMPT, 16)
                    for completion in spanning:
                        check_switch(completion, PROMPT, before, exported)


async def _serve_until(worker: RecordingWorker, version: int) -> list[Completion]:
    """Keep two requests in flight until both have tokens of `version`; all completions in order."""

    async def chain(length: int) -> list[Completion]:
        completions: list[Completion] = []
        while not completions or completions[-1].versions[-1] < version:
            completions.append(await worker.generate("in-flight", PROMPT, length, greedy=True))
        return completions

    # Of different lengths, so that one of them is certainly in flight when the version commits.
    return [completion for done in await asyncio.gather(chain(170), chain(230)) for completion in done]
