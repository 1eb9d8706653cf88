"""A trainer's end of a sync, in the test's own process: real publisher, coordinator and rendezvous, no training.

And replicas besides the one that a test is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import load_tensors
from waiting import HANG_S

from weightlane.ckpt_engines import CheckpointEngineRegistry, UntouchedError, WeightlaneError
from weightlane.rollout import LocalReplica, ServerReplica
from weightlane.sync import (
    CommitReport,
    Coordinator,
    Expectation,
    ExpectedTensor,
    LocalShard,
    Publisher,
    Rendezvous,
    Replica,
    ReplicaState,
    Subscriber,
    SyncConfig,
    SyncReport,
    TensorSpec,
)
from weightlane.sync.config import CodecPolicy, Quantise


class OneRankTrainer:
    """Holds live tensors, as a trainer does, and publishes whatever is copied into them."""

    def __init__(
        self,
        model: Path | dict[str, torch.Tensor],
        backend: str = "shm",
        options: dict[str, Any] | None = None,
        codec: CodecPolicy = "dense",
        quantise: Quantise = "none",
    ) -> None:
        tensors = load_tensors(model) if isinstance(model, Path) else model
        self.live = {name: tensor.clone() for name, tensor in tensors.items()}
        self.backend, self.options = backend, options or {}
        self.version = 0
        self.codecs: list[str] = []
        self._rendezvous = Rendezvous.host()
        specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.live.items()]
        self._publisher = Publisher(
            "trainer-0",
            self._rendezvous.address,
            shards=[LocalShard.whole(spec, self.live[spec.name]) for spec in specs],
            engine=CheckpointEngineRegistry().create(backend, options),
            bucket_bytes=1 << 16,
            codec=codec,
            quantise=quantise,
        )
        self._coordinator: Coordinator | None = None

    @property
    def states(self) -> dict[str, ReplicaState]:
        assert self._coordinator is not None
        return self._coordinator.states()

    @property
    def address(self) -> dict[str, Any]:
        return self._rendezvous.address.to_plain()

    async def connect(self, replicas: Sequence[Replica], quorum: float = 0.5, retries: int = 1) -> None:
        config = SyncConfig(deadline_s=HANG_S, rejoin_s=HANG_S, retries=retries, quorum=quorum)
        self._coordinator = Coordinator(self._rendezvous, ["trainer-0"], replicas, config)
        await self._coordinator.connect()

    async def sync(self, model: Path) -> SyncReport:
        """Take over the weights of `model` and carry them to the replicas as the next version."""
        with torch.no_grad():
            tensors = load_tensors(model)
            for name, live in self.live.items():
                live.copy_(tensors[name])
        return await self.sync_live()

    async def sync_live(self) -> SyncReport:
        """Carry the live tensors, as they are, to the replicas as the next version."""
        assert self._coordinator is not None
        self.version += 1
        self._publisher.publish(self.version)
        syncing = asyncio.create_task(self._coordinator.sync(self.version))
        await asyncio.to_thread(self._publisher.fence)
        report = await syncing
        self.codecs.append(report.codec)
        return report

    def close(self) -> None:
        if self._coordinator is not None:
            self._coordinator.close()
        self._publisher.close()


class PlainReplica:
    """A replica of one rank that does with every version what it is asked to; nothing else may happen to it."""

    def __init__(self, name: str, take: Callable[[int], object]) -> None:
        self.name, self._take = name, take

    def subscriber_names(self) -> list[str]:
        return [f"{self.name}/0"]

    async def commit(self, version: int) -> CommitReport:
        await asyncio.to_thread(self._take, version)
        return CommitReport(version, blocked_s=0.0)

    async def rollback(self, version: int) -> None:
        raise AssertionError("it has never taken a version that was given up")

    async def quarantine(self, error: WeightlaneError) -> None:
        raise error


def served_by(replica: LocalReplica | ServerReplica) -> Callable[[int], Awaitable[None]]:
    """Waits until a replica has committed the version it is given."""

    async def served(version: int) -> None:
        while replica.version != version:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)

    return served


class OtherReplica(PlainReplica):
    """A second replica, which stages every version and may refuse to commit it."""

    def __init__(self, name: str, trainer: OneRankTrainer) -> None:
        super().__init__(name, lambda version: None)
        self.refuses_after: Callable[[int], Awaitable[object]] | None = None
        """Function of the version that the replica awaits before it refuses the commit. With None, the replica commits."""
        tensors = {
            name: ExpectedTensor(tuple(tensor.shape), frozenset({tensor.dtype}))
            for name, tensor in trainer.live.items()
        }
        self.subscriber = Subscriber(
            f"{name}/0", trainer.address, trainer.backend, trainer.options, Expectation(tensors)
        )

    async def commit(self, version: int) -> CommitReport:
        if self.refuses_after is not None:
            await self.refuses_after(version)
            raise UntouchedError("not with me.", part=self.name)
        return await super().commit(version)
