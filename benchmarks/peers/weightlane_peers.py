"""weightlane itself, end to end: publisher and coordinator beside the sender's tensors, a subscriber beside each receiver's.

What is measured is what a run does: publish, fence, transfer in the background into the receiver's staging, a commit that
copies into the live tensors. Between publish and fence there is no training step here, so the trainer is blocked for the whole
snapshot; and the receiver is blocked for its commit only.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import torch

from weightlane.ckpt_engines import WeightlaneError
from weightlane.sync import (
    CollectivePublisher,
    CommitReport,
    Expectation,
    ExpectedTensor,
    LocalShard,
    Outcome,
    Subscriber,
    SyncConfig,
    TensorSpec,
)

from .halves import HalvesPeer, Link, Receiver, Sender
from .peer import Peer, Through
from .workload import copy_all


class _Replica:
    """A receiver as the coordinator sees it, which runs in the sender's process."""

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number
        self.name = f"rollout-{number}"

    def subscriber_names(self) -> list[str]:
        return [f"{self.name}/0"]

    async def connect(self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> None:
        await self._call("connect", (dict(rendezvous), backend, dict(options)))

    async def commit(self, version: int) -> CommitReport:
        return CommitReport(version, blocked_s=await self._call("commit", version))

    async def rollback(self, version: int) -> None:
        raise RuntimeError(f"version {version} was rolled back; a benchmark has no use for that")

    async def quarantine(self, error: WeightlaneError) -> None:
        raise RuntimeError("a receiver failed") from error

    async def _call(self, what: str, arguments: object) -> Any:
        self._link.tell_receiver(self._number, (what, arguments))
        return await asyncio.to_thread(self._link.hear_receiver, self._number)


class _Publishes(Sender):
    def prepare(self) -> None:
        shards = [
            LocalShard.whole(TensorSpec(name, tuple(tensor.shape), torch.bfloat16), tensor)
            for name, tensor in self.tensors.items()
        ]
        engine: dict[str, Any] = {}
        if self.options["engine"] == "filesystem":
            engine = {"path": str(self.link.disk_dir / "versions"), "keep_versions": 1}
        self._publisher = CollectivePublisher(
            shards,
            [_Replica(self.link, number) for number in range(self.link.receivers)],
            backend=self.options["engine"],
            options=engine,
            config=SyncConfig(
                deadline_s=self.link.deadline_s,
                stall_s=self.link.deadline_s,
                quorum=1.0,
                integrity=self.options["integrity"],
            ),
            max_failed=1,
        )

    def send(self, round_number: int) -> None:
        self._publisher.publish(round_number)
        self._publisher.fence()

    def after_round(self, round_number: int) -> None:
        report = self._publisher.wait()
        if report is None or any(part.outcome is not Outcome.COMMITTED for part in report.replicas.values()):
            raise RuntimeError(f"version {round_number} was not committed everywhere: {report}")

    def close(self) -> None:
        if hasattr(self, "_publisher"):
            self._publisher.close()


class _Subscribes(Receiver):
    def prepare(self) -> None:
        what, (rendezvous, backend, options) = self.link.hear_sender(self.receiver)
        assert what == "connect", what
        expected = {
            name: ExpectedTensor(tuple(tensor.shape), frozenset({torch.bfloat16}))
            for name, tensor in self.tensors.items()
        }
        self._subscriber = Subscriber(f"rollout-{self.receiver}/0", rendezvous, backend, options, Expectation(expected))
        self.link.tell_sender(self.receiver, "connected")

    def receive(self, round_number: int) -> float:
        what, version = self.link.hear_sender(self.receiver)
        assert (what, version) == ("commit", round_number), (what, version)
        blocked_from = time.monotonic()
        copy_all(self.tensors, self._subscriber.take(version))
        self._subscriber.release(version)
        self.link.tell_sender(self.receiver, time.monotonic() - blocked_from)
        return blocked_from

    def close(self) -> None:
        if hasattr(self, "_subscriber"):
            self._subscriber.close()


_ENGINES: tuple[tuple[str, Through, str], ...] = (
    ("shm", "memory", "buckets in shared memory"),
    ("gloo", "network", "buckets broadcast over gloo"),
    ("filesystem", "files", "files through the page cache"),
)


class _Weightlane(HalvesPeer):
    group = "weightlane"
    packages = ("weightlane",)
    sender = _Publishes
    receiver = _Subscribes

    def __init__(self, engine: str, through: Through, how: str, suffix: str, integrity: str, said: str) -> None:
        super().__init__(f"weightlane-{engine}{suffix}", f"{how}; {said}", engine=engine, integrity=integrity)
        self.through = through


WEIGHTLANE: tuple[Peer, ...] = tuple(
    _Weightlane(engine, through, how, suffix, integrity, said)
    for engine, through, how in _ENGINES
    for suffix, integrity, said in (
        ("", "full", "every bucket checksummed on both sides"),
        ("-unchecked", "off", "integrity off, as every peer"),
    )
)
