"""`VersionKeeper`: publishes and syncs versions during training, one at a time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from weightlane.ckpt_engines import SyncAbortedError
from weightlane.sync import Outcome, ReplicaState, SyncReport

from .protocols import Rollout, Syncer, Trainers

_CATCH_UP_S = 1.0
"""Seconds to wait for a newer version before one is sent again to replicas that missed it; doubled each time."""
_PAUSE_S = 0.1
"""Seconds between an aborted version and the next one; doubled each time."""
_LONGEST_PAUSE_S = 30.0


class SyncTime(NamedTuple):
    """The times of a committed version, in seconds: see `SyncReport`."""

    export_s: float
    transfer_s: float
    install_s: float
    rollout_blocked_s: float
    latency_s: float


@dataclass(slots=True)
class SyncTimes:
    """The versions of a run with their times in seconds, for the closing summary."""

    synced: list[SyncTime] = field(default_factory=list)
    """Committed versions for which the trainer did not wait."""
    publish_s: dict[int, float] = field(default_factory=dict)
    """Time `publish` blocked the trainer, by version."""
    fence_s: dict[int, float] = field(default_factory=dict)
    """Time the optimizer waited for the snapshot, by version."""
    committed: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)

    @property
    def trainer_blocked_s(self) -> list[float]:
        """Publish plus fence of every published version."""
        return [seconds + self.fence_s.get(version, 0.0) for version, seconds in self.publish_s.items()]


class VersionKeeper:
    """Decides which versions are published, and follows each to its end.

    A version is published only between two optimizer steps, and only while no other one is being synced. Of the versions that
    the trainer finishes meanwhile, only the newest is published. So the trainer waits for a sync before a save or an export only:
    see `handed_over`. Replicas that do not have the serving version get the next one or, if none is due, the serving version
    again.

    `on_commit` gets the report of every sync that put a version into service. A run survives `max_failures` consecutive aborts.
    """

    def __init__(
        self,
        trainers: Trainers,
        syncer: Syncer,
        *,
        on_commit: Callable[[SyncReport], Awaitable[None]],
        max_failures: int,
    ) -> None:
        self._trainers = trainers
        self._syncer = syncer
        self._on_commit = on_commit
        self._max_failures = max_failures
        self._failures = 0
        self._offered = -1
        """The version the parameters have now; -1 while an optimizer step may be changing them."""
        self._published = -1
        """The version that was published last; the publishers hold it."""
        self._handed_over = -1
        """The newest version whose `Trainers.publish` has returned."""
        self._publication = asyncio.Event()
        self._served = -1
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        """Lock that is held during a sync."""
        self._joining: list[tuple[str, Rollout]] = []
        self._behind: set[str] = set()
        """Replicas that missed the newest version and serve an older one."""
        self._patience_s = _CATCH_UP_S
        self._catch_up_at = 0.0
        """Loop time at which replicas that missed the version are sent it again, if no newer one is due before."""
        self._timer: asyncio.TimerHandle | None = None
        self._broken = asyncio.Event()
        self.times = SyncTimes()

    async def publish_blocking(self, version: int) -> float:
        """Publish `version` and wait until it serves; returns the seconds that took. Raises if it was aborted.

        To be called between optimizer steps.
        """
        if self._task is not None:
            await asyncio.wait([self._task])
            self.raise_if_failed()
        async with self._turn:
            started = time.perf_counter()
            await self._publish(version)
            report = await self._sync(version)
            seconds = time.perf_counter() - started
            self._served, self._failures = version, 0
            self.times.committed.append(version)
            await self._committed(report)
        return seconds

    async def time_blocking(self, version: int) -> float | None:
        """Publish `version`, wait until it serves, and return the seconds; None if it was aborted, which counts as a failure."""
        try:
            return await self.publish_blocking(version)
        except SyncAbortedError as error:
            self.times.aborted.append(version)
            self._failed(error)
            return None

    async def handed_over(self, version: int) -> None:
        """Wait until the publishers have been given `version`, or no background sync is running that will give it to them.

        To be called inside `between_steps`: a save or an export after this call does not delay the version. If an earlier version
        is still being synced, this waits for its end.
        """
        while self._handed_over < version and self._task is not None and not self._task.done():
            self._publication.clear()
            published = asyncio.create_task(self._publication.wait())
            await asyncio.wait({self._task, published}, return_when=asyncio.FIRST_COMPLETED)
            published.cancel()

    @asynccontextmanager
    async def between_steps(self, version: int) -> AsyncIterator[None]:
        """Mark the period in which the parameters are those of `version`; they may be published during it.

        Raises the error of a background sync that failed for good.
        """
        self.raise_if_failed()
        self._offered = version
        self._start()
        # If groups are ready already, the loop would begin its next step before the new task runs for the first time.
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

    def join(self, name: str, newcomer: Rollout) -> None:
        """Let `newcomer` take part from the next sync on, which is due now, in the place of `name` unless that is empty."""
        self._joining.append((name, newcomer))
        self.catch_up()

    async def leave(self, name: str) -> None:
        """Remove the replica `name` from the coordinator, once no sync is running."""
        async with self._turn:
            self._remove(name)

    def _remove(self, name: str) -> None:
        replaced = [dead for dead, newcomer in self._joining if newcomer.name == name]
        if not replaced:
            self._syncer.remove(name)
            return
        # No sync has added it, or removed the one that it was to replace.
        self._joining = [each for each in self._joining if each[1].name != name]
        if replaced[0]:
            self._remove(replaced[0])

    def catch_up(self) -> None:
        """Send the serving version to replicas that do not have it, unless a newer one is due."""
        self._catch_up_at, self._patience_s = 0.0, _CATCH_UP_S
        self._start()

    def note_fence(self, seconds: float) -> dict[str, float]:
        """Note that an optimizer step waited `seconds` for the snapshot of the version published last.

        Returns what that version cost the trainer, once: ``published_version`` and ``trainer_blocked_s`` (publish plus fence).
        """
        version = max(self.times.publish_s, default=-1)
        if version < 0 or version in self.times.fence_s:
            return {}
        self.times.fence_s[version] = seconds
        return {"published_version": version, "trainer_blocked_s": self.times.publish_s[version] + seconds}

    async def watch(self) -> NoReturn:
        """Raise the error of a background sync that failed for good, even while the trainer waits for groups."""
        await self._broken.wait()
        self.raise_if_failed()
        raise AssertionError("a follower that has failed raises")

    def raise_if_failed(self) -> None:
        """Raise the error of a background sync that failed for good, if there is one."""
        if self._task is not None and self._task.done() and not self._task.cancelled():
            self._task.result()

    async def cancel(self) -> None:
        """Stop publishing and syncing, at the end of a run."""
        self._offered = self._published = -1
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _start(self) -> None:
        """Start the background task, if there is something to do and the one before has not failed for good."""
        ready = self._task is None or (self._task.done() and not self._task.cancelled() and not self._task.exception())
        if ready and (self._newer() or self._due()):
            self._task = asyncio.create_task(self._follow(), name="version-keeper")
            self._task.add_done_callback(self._followed)

    def _newer(self) -> bool:
        return self._offered > self._served

    def _due(self) -> bool:
        """Whether the serving version is due to be sent once more, and still held by the publishers."""
        now = asyncio.get_running_loop().time()
        return self._served >= 0 and self._published == self._served and now >= self._catch_up_at and self._lacking()

    def _lacking(self) -> bool:
        """Whether a replica that can be reached does not have the serving version."""
        states = self._syncer.states()
        waiting = (ReplicaState.JOINING, ReplicaState.QUARANTINED)
        return bool(self._joining) or any(
            state in waiting or (state is ReplicaState.SERVING and name in self._behind)
            for name, state in states.items()
        )

    def _followed(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._broken.set()

    async def _follow(self) -> None:
        """Publish and sync the newest offered version until the newest one serves and no replica is due to catch up."""
        while True:
            async with self._turn:
                if self._newer():
                    failed = not await self._carry(self._offered)
                elif self._due():
                    failed = not await self._repeat()
                else:
                    break
            if failed:
                await asyncio.sleep(min(_LONGEST_PAUSE_S, _PAUSE_S * 2 ** (self._failures - 1)))
        if self._lacking():
            loop = asyncio.get_running_loop()
            if self._timer is not None:
                self._timer.cancel()
            self._timer = loop.call_at(max(self._catch_up_at, loop.time()), self._start)

    async def _carry(self, version: int) -> bool:
        """Publish and sync `version`. Returns whether it serves."""
        self.times.publish_s[version] = await self._publish(version)
        try:
            report = await self._sync(version)
        except SyncAbortedError as error:
            self.times.aborted.append(version)
            self._failed(error)
            return False
        self._failures = 0
        self._served = version
        self.times.committed.append(version)
        self.times.synced.append(SyncTime(*(getattr(report, name) for name in SyncTime._fields)))
        await self._committed(report)
        return True

    async def _publish(self, version: int) -> float:
        self._published = version
        seconds = await self._trainers.publish(version)
        self._handed_over = version
        self._publication.set()
        return seconds

    async def _repeat(self) -> bool:
        """Sync the serving version again, for replicas that do not have it. Returns False if no replica serves any more."""
        try:
            report = await self._sync(self._served)
        except SyncAbortedError as error:
            self._wait_longer()
            if ReplicaState.SERVING in self._syncer.states().values():
                return True
            self._failed(error)
            return False
        await self._committed(report)
        return True

    async def _sync(self, version: int) -> SyncReport:
        joining, self._joining = self._joining, []
        for name, newcomer in joining:
            if name:
                self._syncer.remove(name)
            self._syncer.add(newcomer)
        return await self._syncer.sync(version)

    async def _committed(self, report: SyncReport) -> None:
        """Remember which replicas missed a version that serves, and call `on_commit`."""
        outcomes = {name: part.outcome for name, part in report.replicas.items()}
        self._behind = {name for name, outcome in outcomes.items() if outcome is Outcome.BEHIND}
        if self._behind or Outcome.QUARANTINED in outcomes.values():
            self._wait_longer()
        else:
            self._patience_s = _CATCH_UP_S
        await self._on_commit(report)

    def _wait_longer(self) -> None:
        self._catch_up_at = asyncio.get_running_loop().time() + self._patience_s
        self._patience_s = min(_LONGEST_PAUSE_S, 2 * self._patience_s)

    def _failed(self, error: SyncAbortedError) -> None:
        self._failures += 1
        if self._failures > self._max_failures:
            raise error
