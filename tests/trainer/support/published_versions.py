"""The other end of what a role publishes: a coordinator, and a replica that keeps every version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, closing

import torch
from waiting import HANG_S

from weightlane.ckpt_engines import WeightlaneError
from weightlane.sync import (
    CheckpointEngineConfig,
    CommitReport,
    Coordinator,
    Expectation,
    ExpectedTensor,
    Rendezvous,
    Subscriber,
    SyncConfig,
)
from weightlane.trainer.dispatch.dispatch import Role


class Keeper:
    """A replica of one rank."""

    name = "rollout-0"

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self.versions: dict[int, dict[str, torch.Tensor]] = {}

    def subscriber_names(self) -> list[str]:
        return [f"{self.name}/0"]

    async def commit(self, version: int) -> CommitReport:
        await asyncio.to_thread(self._take, version)
        return CommitReport(version, blocked_s=0.0)

    def _take(self, version: int) -> None:
        self.versions[version] = {name: each.clone() for name, each in self._subscriber.take(version).items()}
        self._subscriber.release(version)

    async def rollback(self, version: int) -> None:
        raise AssertionError("no version is given up")

    async def quarantine(self, error: WeightlaneError) -> None:
        raise error


@asynccontextmanager
async def publishing(role: Role, tensors: Mapping[str, torch.Tensor]) -> AsyncIterator[tuple[Coordinator, Keeper]]:
    """Connect a role's ranks to a replica that expects tensors like these, in float32."""
    rendezvous = Rendezvous.host()
    address, sync = rendezvous.address.to_plain(), SyncConfig(deadline_s=HANG_S, quorum=1.0, bucket_mib=0.01)
    await role.connect(address, CheckpointEngineConfig(backend="shm"), sync, torch.float32)
    expected = {
        name: ExpectedTensor(tuple(tensor.shape), frozenset({torch.float32})) for name, tensor in tensors.items()
    }
    with closing(Subscriber("rollout-0/0", address, "shm", {}, Expectation(expected))) as subscriber:
        keeper = Keeper(subscriber)
        with closing(Coordinator(rendezvous, role.publisher_names(), [keeper], sync)) as coordinator:
            await coordinator.connect()
            yield coordinator, keeper
