"""A trainer's end of a sync, in the test's own process: real publisher, coordinator and rendezvous, no training.

And replicas besides the one that a test is about.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tiny_models import load_tensors
from waiting import HANG_S

from weightlane.ckpt_engines import WeightlaneError
from weightlane.rollout import LocalReplica, ServerReplica
from weightlane.rollout.conformance import publishing
from weightlane.sync import CommitReport, Replica, SyncReport
from weightlane.sync.config import CodecPolicy, Quantise


class OneRankTrainer(publishing.OneRankTrainer):
    """Holds the tensors of a model, as a trainer does, and publishes whatever is copied into them."""

    def __init__(
        self,
        model: Path | dict[str, torch.Tensor],
        backend: str = "shm",
        options: dict[str, Any] | None = None,
        codec: CodecPolicy = "dense",
        quantise: Quantise = "none",
    ) -> None:
        super().__init__(_tensors(model), backend, options or {}, codec=codec, quantise=quantise)
        self.codecs: list[str] = []

    async def connect(
        self, replicas: Sequence[Replica], deadline_s: float = HANG_S, *, quorum: float = 0.5, retries: int = 1
    ) -> None:
        await super().connect(replicas, deadline_s, quorum=quorum, retries=retries)

    async def sync(self, tensors: Path | Mapping[str, torch.Tensor]) -> SyncReport:
        return await super().sync(_tensors(tensors))

    async def sync_live(self) -> SyncReport:
        report = await super().sync_live()
        self.codecs.append(report.codec)
        return report


def _tensors(model: Path | Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
    return load_tensors(model) if isinstance(model, Path) else model


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
