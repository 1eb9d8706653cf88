"""A running replica of real vLLM for many tests, and a trainer in this process that publishes to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from publishing import OneRankTrainer
from tiny_models import load_tensors, vllm_parameters
from waiting import HANG_S

from weightlane.rollout import CommitReport, Completion, RolloutConfig, RolloutWorker
from weightlane.sync import Replica
from weightlane.sync.config import CodecPolicy, Quantise

T = TypeVar("T")


class RecordingWorker(RolloutWorker):
    """Keeps the last commit's report, of which the coordinator passes on a part."""

    report: CommitReport

    async def commit(self, version: int) -> CommitReport:
        self.report = await super().commit(version)
        return self.report


@contextmanager
def running(models: list[Path], started_from: Path, **settings: Any) -> Iterator[Setup]:
    """A worker that was started from a checkpoint, with `settings` of `RolloutConfig`; `models` are for its trainer."""
    config = RolloutConfig(
        max_model_len=1024,
        kv_cache_memory_bytes=64 << 20,
        extra_engine_args={"worker_extension_cls": "probe_extension.ProbeExtension"},
        **settings,
    )
    environment = dict(os.environ)
    with asyncio.Runner() as runner:
        worker = RecordingWorker("rollout-0", config, started_from)
        try:
            runner.run(worker.start())
            # Other tests of the session must not find what a replica's own process sets.
            os.environ.clear()
            os.environ.update(environment)
            yield Setup(runner, worker, models, config.tensor_parallel)
        finally:
            runner.run(worker.close())


@dataclass
class Setup:
    """A running worker, a trainer that publishes to it, and three models of the same shape."""

    runner: asyncio.Runner
    worker: RecordingWorker
    models: list[Path]
    world: int
    trainer: OneRankTrainer = field(init=False)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(call, HANG_S))

    def new_trainer(
        self,
        backend: str = "shm",
        codec: CodecPolicy = "dense",
        quantise: Quantise = "none",
        options: dict[str, Any] | None = None,
    ) -> OneRankTrainer:
        """Put a new trainer in the place of the one before."""
        self.trainer = OneRankTrainer(self.models[0], backend, options, codec=codec, quantise=quantise)
        return self.trainer

    def connect(self, *, quorum: float = 0.5, others: Iterable[Replica] = (), retries: int = 1) -> None:
        """Let the trainer publish to the worker and to `others`."""
        self.run(self.worker.connect(self.trainer.address, self.trainer.backend, self.trainer.options))
        self.run(self.trainer.connect([self.worker, *others], quorum, retries))
        self.trainer.version = self.worker.version

    def probe(self, method: str, *args: object) -> list[Any]:
        answers: list[Any] = self.run(self.worker._engine.collective_rpc(method, args=args))
        return answers

    def serve(self, model: int, kv_on_commit: str = "recompute") -> int:
        """Make the worker serve the weights of a model; returns their version."""
        self.worker.config = self.worker.config.model_copy(update={"kv_on_commit": kv_on_commit})
        self.run(self.trainer.sync(self.models[model]))
        return self.trainer.version

    async def held(self, folder: Path) -> None:
        """Wait until a rank waits where `probe_hold` says."""
        while not (folder / "reached").exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.005)

    async def tokens(self, count: int) -> None:
        """Wait until so many more tokens were generated."""
        wanted = self.worker.clock.tokens + count
        while self.worker.clock.tokens < wanted:  # noqa: ASYNC110 - nothing announces a count
            await asyncio.sleep(0.002)

    def greedy(self, prompt: list[int], count: int = 16) -> Completion:
        return self.run(self.worker.generate("r", prompt, count, greedy=True))

    def check_parameters(self, model: int) -> None:
        """Every live parameter is that of a model, bit for bit, by a mapping that owes nothing to vLLM's loaders."""
        self.check_tensors(load_tensors(self.models[model]))

    def check_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """As `check_parameters`, of given checkpoint tensors."""
        for rank, live in enumerate(self.probe("probe_parameters")):
            expert_parallel = self.worker.config.expert_parallel
            wanted = vllm_parameters(tensors, rank=rank, world=self.world, expert_parallel=expert_parallel)
            assert live.keys() == wanted.keys()
            for name, tensor in wanted.items():
                raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                assert live[name] == [str(tensor.dtype), list(tensor.shape), raw], f"{name} on rank {rank}"
