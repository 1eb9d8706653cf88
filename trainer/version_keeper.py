"""Publishing and syncing versions beside the training, one at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from weightlane.ckpt_engines import SyncAbortedError
from weightlane.sync import SyncReport

from .protocols import Syncer, Trainers


@dataclass(slots=True)
class SyncTimes:
    """Figures of every committed version, in seconds, for the closing summary."""

    latency_s: list[float] = field(default_factory=list)
    rollout_blocked_s: list[float] = field(default_factory=list)
    publish_s: dict[int, float] = field(default_factory=dict)
    """Time `publish` blocked the trainer, by version."""
    fence_s: dict[int, float] = field(default_factory=dict)
    """Time the optimizer waited for the snapshot, by version."""
    committed: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)

    def trainer_blocked_s(self) -> list[float]:
        """Publish plus fence of every published version."""
        return [seconds + self.fence_s.get(version, 0.0) for version, seconds in self.publish_s.items()]


class VersionKeeper:
    """Decides which versions are published, and follows each to its end.

    A version is published only between two optimizer steps, and only while no other one is on its way; one that the trainer
    finishes meanwhile is skipped in favour of the newest. So the trainer never waits for a sync.

    Args:
        trainers: All trainer ranks.
        syncer: The coordinator.
        on_commit: Called with the report of every committed version.
        on_abort: Called with the version and the error of every aborted one.
        max_failures: Consecutive aborts the run survives.
    """

    def __init__(
        self,
        trainers: Trainers,
        syncer: Syncer,
        *,
        on_commit: Callable[[SyncReport], Awaitable[None]],
        on_abort: Callable[[int, SyncAbortedError], None],
        max_failures: int,
    ) -> None:
        self._trainers = trainers
        self._syncer = syncer
        self._on_commit = on_commit
        self._on_abort = on_abort
        self._max_failures = max_failures
        self._failures = 0
        self._offered = -1
        """The version the parameters have now; -1 while an optimizer step may be changing them."""
        self._served = -1
        self._task: asyncio.Task[None] | None = None
        self.times = SyncTimes()

    async def publish_blocking(self, version: int) -> float:
        """Publish `version` and wait until it serves everywhere; returns the seconds that took. Raises if it was aborted.

        To be called between optimizer steps.
        """
        if self._task is not None:
            await asyncio.wait([self._task])
            self.raise_if_failed()
        started = time.perf_counter()
        await self._trainers.publish(version)
        report = await self._syncer.sync(version)
        seconds = time.perf_counter() - started
        self._served = version
        self.times.committed.append(version)
        await self._on_commit(report)
        return seconds

    @asynccontextmanager
    async def between_steps(self, version: int) -> AsyncIterator[None]:
        """Mark the time in which the parameters are those of `version`; they may be published inside it.

        Raises what a background sync could not recover from.
        """
        self._offered = version
        self._start()
        # When groups are waiting already, the loop would be in its next step before the new task had its first turn.
        await asyncio.sleep(0)
        try:
            yield
        finally:
            self._offered = -1
        self.raise_if_failed()

    async def drain(self, version: int) -> None:
        """Wait until `version`, the last one, serves. Raises when it does not."""
        while self._served < version:
            async with self.between_steps(version):
                if self._task is not None:
                    await asyncio.wait([self._task])

    def note_fence(self, seconds: float) -> dict[str, float]:
        """An optimizer step waited `seconds` for the snapshot of the version published last.

        Returns what that version cost the trainer, once: ``published_version`` and ``trainer_blocked_s`` (publish plus fence).
        """
        version = max(self.times.publish_s, default=-1)
        if version < 0 or version in self.times.fence_s:
            return {}
        self.times.fence_s[version] = seconds
        return {"published_version": version, "trainer_blocked_s": self.times.publish_s[version] + seconds}

    def raise_if_failed(self) -> None:
        """Raise what a background sync could not recover from."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def cancel(self) -> None:
        """Stop following; for the end of a run."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _start(self) -> None:
        self.raise_if_failed()
        if self._offered > self._served and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._follow(), name="version-keeper")

    async def _follow(self) -> None:
        """Publish and sync the newest offered version until none is newer than what serves."""
        while (version := self._offered) > self._served:
            self.times.publish_s[version] = await self._trainers.publish(version)
            try:
                report = await self._syncer.sync(version)
            except SyncAbortedError as error:
                self._failures += 1
                self.times.aborted.append(version)
                self._on_abort(version, error)
                if self._failures > self._max_failures:
                    raise
            else:
                self._failures = 0
                self._served = version
                self.times.committed.append(version)
                self.times.latency_s.append(report.latency_s)
                self.times.rollout_blocked_s.append(report.rollout_blocked_s)
                await self._on_commit(report)
