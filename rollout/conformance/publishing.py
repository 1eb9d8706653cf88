"""`OneRankTrainer`: the trainer's end of a sync in the suite's process, with a real publisher, coordinator and rendezvous."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import torch

from weightlane.ckpt_engines import CheckpointEngineRegistry, UntouchedError, WeightlaneError
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

from ..replicas.local_replica import LocalReplica

_NAME = "trainer-0"
_BUCKET_MIB = 1 / 16
"""Several buckets per version, also for tiny models."""


class OneRankTrainer:
    """Holds tensors, and publishes whatever is copied into them.

    Args:
        tensors: The first weights, by name; their shapes and dtypes stay.
        backend: Name of the checkpoint engine.
        options: Options of that engine.
        version: Number after which versions are counted.
        publishing: Further settings of the sync.
    """

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        backend: str,
        options: Mapping[str, Any],
        version: int = 0,
        **publishing: Any,
    ) -> None:
        self.backend, self.options, self.version = backend, dict(options), version
        self.live = {name: tensor.clone() for name, tensor in tensors.items()}
        self._rendezvous = Rendezvous.host()
        specs = [TensorSpec(name, tuple(tensor.shape), tensor.dtype) for name, tensor in self.live.items()]
        self._publisher = Publisher(
            _NAME,
            self._rendezvous.address,
            shards=[LocalShard.whole(spec, self.live[spec.name]) for spec in specs],
            engine=CheckpointEngineRegistry().create(backend, self.options),
            config=SyncConfig(**{"bucket_mib": _BUCKET_MIB, **publishing}),
        )
        self._coordinator: Coordinator | None = None

    @property
    def address(self) -> dict[str, Any]:
        """Address of the rendezvous, for `LocalReplica.connect`."""
        return self._rendezvous.address.to_plain()

    @property
    def states(self) -> Mapping[str, ReplicaState]:
        """The states in which the coordinator has the replicas, by name; none before `connect`."""
        return {} if self._coordinator is None else self._coordinator.states()

    async def connect(
        self, replicas: Sequence[Replica], deadline_s: float, *, quorum: float = 1.0, retries: int = 0
    ) -> None:
        """Connect all participants. A version is aborted unless the share `quorum` of `replicas` commit it."""
        config = SyncConfig(deadline_s=deadline_s, rejoin_s=deadline_s, quorum=quorum, retries=retries)
        self._coordinator = Coordinator(self._rendezvous, [_NAME], replicas, config)
        await self._coordinator.connect()

    async def sync(self, tensors: Mapping[str, torch.Tensor]) -> SyncReport:
        """Publish `tensors` as the next version. Raises the error of a version that is aborted."""
        for name, live in self.live.items():
            live.copy_(tensors[name])
        return await self.sync_live()

    async def sync_live(self) -> SyncReport:
        """Publish the live tensors, as they are, as the next version; raises as `sync`."""
        assert self._coordinator is not None, "connected"
        self.version += 1
        self._publisher.publish(self.version)
        syncing = asyncio.create_task(self._coordinator.sync(self.version))
        try:
            await asyncio.to_thread(self._publisher.fence)
        finally:
            report = await syncing
        return report

    def close(self) -> None:
        """Leave. Idempotent, never raises."""
        if self._coordinator is not None:
            self._coordinator.close()
        self._publisher.close()
        self._rendezvous.close()


class GatedReplica(LocalReplica):
    """The replica under test. A check can act between the staging and the commit of a version."""

    before_commit: Callable[[], Awaitable[object]] | None = None
    """Awaited once, before the next commit by the coordinator."""

    async def commit(self, version: int) -> CommitReport:
        """Commit a version after `before_commit`."""
        action, self.before_commit = self.before_commit, None
        if action is not None:
            await action()
        return await super().commit(version)


class RefusingReplica:
    """A second replica, which stages every version, and refuses to commit it after `before_refusal` if that is set."""

    def __init__(self, name: str, trainer: OneRankTrainer) -> None:
        self.name = name
        self.before_refusal: Callable[[int], Awaitable[object]] | None = None
        tensors = {
            key: ExpectedTensor(tuple(tensor.shape), frozenset({tensor.dtype})) for key, tensor in trainer.live.items()
        }
        (subscriber,) = self.subscriber_names()
        self._subscriber = Subscriber(
            subscriber, trainer.address, trainer.backend, trainer.options, Expectation(tensors)
        )

    def subscriber_names(self) -> list[str]:
        """The name of its one subscriber."""
        return [f"{self.name}/0"]

    async def commit(self, version: int) -> CommitReport:
        """Take or refuse a version."""
        if self.before_refusal is not None:
            await self.before_refusal(version)
            raise UntouchedError(f"version {version} is not for this replica.", part=self.name)
        return CommitReport(version, blocked_s=0.0)

    async def rollback(self, version: int) -> None:
        """Do nothing: it has taken no version that was given up."""

    async def quarantine(self, error: WeightlaneError) -> None:
        """Do nothing: it gets no requests."""

    def close(self) -> None:
        """Leave the publisher."""
        self._subscriber.close()
