"""Running replicas of real vLLM, and one for many tests with a trainer in this process that publishes to it."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from publishing import OneRankTrainer
from tiny_models import check_ranks, copy_with, is_greedy, load_tensors
from tiny_run import IN_ENGINE
from waiting import HANG_S

from weightlane.rollout import Completion, LocalReplica, RolloutConfig
from weightlane.rollout.conformance.publishing import RefusingReplica
from weightlane.sync import CommitReport, SyncReport
from weightlane.sync.config import CodecPolicy, Quantise

T = TypeVar("T")
PROMPT = [5, 6, 7]


class RecordingReplica(LocalReplica):
    """Keeps the last commit's report, of which the coordinator passes on a part."""

    report: CommitReport

    def configure(self, **changed: Any) -> None:
        """Change options of the replica, and of its engine, which has started."""
        self._engine.config = self.config.model_copy(update=changed)

    async def commit(self, version: int) -> CommitReport:
        self.report = await super().commit(version)
        return self.report

    async def check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Every live parameter is that of a checkpoint, bit for bit, by a mapping that owes nothing to vLLM's loaders."""
        ranks = await self._engine.running.collective_rpc("probe_parameters")
        assert len(ranks) == self.config.tensor_parallel
        check_ranks(ranks, tensors, expert_parallel=self.config.expert_parallel)


@asynccontextmanager
async def slow_steps(replica: LocalReplica) -> AsyncIterator[None]:
    """Inside, decode steps take so long that a completion of sixty tokens outlives whatever else happens, and few CPU seconds."""
    probe = replica._engine.running.collective_rpc
    await probe("probe_pace", args=(0.1,))
    try:
        yield
    finally:
        await probe("probe_pace", args=(0.0,))


def probed_replica(name: str, model: Path, *, in_engine: bool = False, **settings: Any) -> RecordingReplica:
    """A replica with `settings` of `RolloutConfig` that can be probed; `in_engine` without a process for its only rank."""
    extra = {"worker_extension_cls": "probe_extension.ProbeExtension"}
    if in_engine:
        extra["distributed_executor_backend"] = IN_ENGINE
    sizes = {"max_model_len": 1024, "kv_cache_memory_bytes": 64 << 20}
    return RecordingReplica(name, RolloutConfig(extra_engine_args=extra, **{**sizes, **settings}), model)


@contextmanager
def started(*replicas: LocalReplica) -> Iterator[asyncio.Runner]:
    """Where replicas run that have started; they are closed at the end."""

    async def together(method: str) -> None:
        await asyncio.gather(*(getattr(replica, method)() for replica in replicas))

    environment = dict(os.environ)
    with asyncio.Runner() as runner:
        try:
            try:
                runner.run(together("start"))
            finally:  # other tests of the session must not find what a replica's own process sets
                os.environ.clear()
                os.environ.update(environment)
            yield runner
        finally:
            runner.run(together("close"))


@contextmanager
def running(models: list[Path], started_from: Path, **settings: Any) -> Iterator[Setup]:
    """A replica that was started from a checkpoint; `models` are for its trainer."""
    replica = probed_replica("rollout-0", started_from, **settings)
    with started(replica) as runner, closing(Setup(runner, replica, models, replica.config.tensor_parallel)) as setup:
        yield setup


@dataclass
class Setup:
    """A running replica, a trainer that publishes to it, and three models of the same shape."""

    runner: asyncio.Runner
    replica: RecordingReplica
    models: list[Path]
    world: int
    trainer: OneRankTrainer = field(init=False)
    others: list[RefusingReplica] = field(default_factory=list)
    """The trainer's other replicas."""

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(call, HANG_S))

    def connect(
        self,
        backend: str = "shm",
        *,
        codec: CodecPolicy = "dense",
        quantise: Quantise = "none",
        quorum: float = 0.5,
        retries: int = 1,
        with_another: bool = False,
    ) -> None:
        """Put a new trainer in the place of the one before, and connect it to the replica.

        Args:
            with_another: Whether it publishes to a `RefusingReplica`, too.
        """
        self.close()
        self.trainer = OneRankTrainer(self.models[0], backend, codec=codec, quantise=quantise)
        self.others = [RefusingReplica("rollout-1", self.trainer)] if with_another else []
        self.run(self.replica.connect(self.trainer.address, backend, {}))
        self.run(self.trainer.connect([self.replica, *self.others], quorum=quorum, retries=retries))
        self.trainer.version = self.replica.version

    def close(self) -> None:
        """End the trainer."""
        if hasattr(self, "trainer"):
            self.trainer.close()
        for other in self.others:
            other.close()
        self.others = []

    def probe(self, method: str, *args: object) -> list[Any]:
        answers: list[Any] = self.run(self.replica._engine.running.collective_rpc(method, args=args))
        return answers

    def serve(self, model: int, kv_on_commit: str = "recompute") -> int:
        """Make the replica serve the weights of a model; returns their version."""
        self.replica.configure(kv_on_commit=kv_on_commit)
        self.run(self.trainer.sync(self.models[model]))
        assert self.replica.version == self.trainer.version
        return self.trainer.version

    def nudge(self) -> SyncReport:
        """Change about one element in thirty of every live tensor of the trainer, and make the replica serve that."""
        for tensor in self.trainer.live.values():
            tensor.view(-1)[self.trainer.version % 30 :: 30] *= 1.0 + 0.5 * self.trainer.version
        return self.run(self.trainer.sync_live())

    def sync_in_flight(self, model: int) -> tuple[SyncReport, list[tuple[list[int], Completion]]]:
        """Make the replica serve the weights of a model while it decodes four completions; each with its prompt."""

        async def sync() -> tuple[SyncReport, list[tuple[list[int], Completion]]]:
            prompts = [[10 + index, 20, 30] for index in range(4)]
            async with slow_steps(self.replica):
                tasks = [asyncio.create_task(self.replica.generate("r", prompt, 60, greedy=True)) for prompt in prompts]
                await self.tokens(20)
                report = await self.trainer.sync(self.models[model])
            return report, list(zip(prompts, await asyncio.gather(*tasks), strict=True))

        return self.run(sync())

    async def held(self, folder: Path) -> None:
        """Wait until a rank waits where `probe_hold` says."""
        while not (folder / "reached").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.01)

    async def tokens(self, count: int) -> None:
        """Wait until so many more tokens were generated."""
        wanted = self.replica.clock.tokens + count
        while self.replica.clock.tokens < wanted:  # noqa: ASYNC110 - nothing announces a count
            await asyncio.sleep(0.01)

    def greedy(self, prompt: list[int], count: int = 16) -> Completion:
        return self.run(self.replica.generate("r", prompt, count, greedy=True))

    def check(self, weights: int | Mapping[str, torch.Tensor]) -> None:
        """The replica serves a model's weights, or these, bit for bit, and decodes with them what transformers does."""
        if isinstance(weights, int):
            model, tensors = self.models[weights], load_tensors(self.models[weights])
        else:
            folder = tempfile.mkdtemp(dir=self.models[0].parent)
            model, tensors = copy_with(weights, self.models[0], Path(folder, "model")), dict(weights)
        assert self.replica.stats().serving
        self.run(self.replica.check(tensors))
        completion = self.greedy(PROMPT)
        assert is_greedy(model, PROMPT, completion.token_ids)
        assert completion.versions == [self.replica.version] * 16
        assert completion.finish_reason == "length"
