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

from .halves import Half, Line, Peer, copy_all


class _Replica:
    """A receiver as the coordinator sees it, which runs in the sender's process."""

    def __init__(self, line: Line, number: int) -> None:
        self._line, self._number = line, number
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
        self._line.tell_receiver(self._number, (what, arguments))
        return await asyncio.to_thread(self._line.from_receiver, self._number)


class _Publishes(Half):
    """Publishes a version, and passes the fence."""

    def prepare(self) -> None:
        shards = [
            LocalShard.whole(TensorSpec(name, tuple(tensor.shape), torch.bfloat16), tensor)
            for name, tensor in self.tensors.items()
        ]
        engine: dict[str, Any] = {}
        limit_s = self.line.deadline_s
        if self.options["engine"] == "filesystem":
            engine = {"path": str(self.line.disk_dir / "versions"), "keep_versions": 1}
        self._publisher = CollectivePublisher(
            shards,
            [_Replica(self.line, number) for number in range(self.line.receivers)],
            backend=self.options["engine"],
            options=engine,
            config=SyncConfig(deadline_s=limit_s, stall_s=limit_s, quorum=1.0, integrity=self.options["integrity"]),
            max_failed=1,
        )

    def exchange(self, round_number: int) -> None:
        self._publisher.publish(round_number)
        self._publisher.fence()

    def after_round(self, round_number: int) -> None:
        report = self._publisher.wait()
        if report is None or any(part.outcome is not Outcome.COMMITTED for part in report.replicas.values()):
            raise RuntimeError(f"version {round_number} was not committed everywhere: {report}")

    def close(self) -> None:
        if hasattr(self, "_publisher"):
            self._publisher.close()


class _Subscribes(Half):
    """Commits by copying."""

    def prepare(self) -> None:
        what, (rendezvous, backend, options) = self.line.from_sender(self.receiver)
        assert what == "connect", what
        expected = {
            name: ExpectedTensor(tuple(tensor.shape), frozenset({torch.bfloat16}))
            for name, tensor in self.tensors.items()
        }
        self._subscriber = Subscriber(f"rollout-{self.receiver}/0", rendezvous, backend, options, Expectation(expected))
        self.line.tell_sender(self.receiver, "connected")

    def exchange(self, round_number: int) -> float:
        what, version = self.line.from_sender(self.receiver)
        assert (what, version) == ("commit", round_number), (what, version)
        blocked_from = time.monotonic()
        copy_all(self.tensors, self._subscriber.take(version))
        self._subscriber.release(version)
        self.line.tell_sender(self.receiver, time.monotonic() - blocked_from)
        return blocked_from

    def close(self) -> None:
        if hasattr(self, "_subscriber"):
            self._subscriber.close()


WEIGHTLANE = tuple(
    Peer(
        f"weightlane-{engine}{suffix}",
        through,
        f"{how}; {checked}",
        _Publishes,
        _Subscribes,
        {"engine": engine, "integrity": integrity},
        group="weightlane",
        packages=("weightlane",),
    )
    for engine, through, how in (
        ("shm", "memory", "buckets in shared memory"),
        ("gloo", "network", "buckets broadcast over gloo"),
        ("filesystem", "files", "files through the page cache"),
    )
    for suffix, integrity, checked in (
        ("", "full", "every bucket checksummed on both sides"),
        ("-unchecked", "off", "integrity off, as with every peer"),
    )
)
