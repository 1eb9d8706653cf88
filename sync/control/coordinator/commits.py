"""`Commits`: the commits of one version on all replicas, from their start to the resulting states of the replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future

from weightlane.ckpt_engines import (
    CommitError,
    Deadline,
    PeerLostError,
    QuarantinedError,
    UntouchedError,
    WeightlaneError,
    WorkerDiedError,
    as_weightlane_error,
)
from weightlane.plugins import RunHooks

from ..messages import COORDINATOR, Failed
from .message_queue import MessageQueue
from .report import CommitReport, Outcome, ReplicaReport
from .roster import ReplicaState, Roster, RosterEntry

_log = logging.getLogger(__name__)
_QUARANTINE_S = 10.0
"""Time limit in seconds for a replica to acknowledge its quarantine; it gets no requests in any case."""
_OUTCOME_OF = {ReplicaState.LOST: Outcome.LOST, ReplicaState.QUARANTINED: Outcome.QUARANTINED}
"""The outcome on a replica that has not committed, by its state. In any other state the replica is merely behind."""


class Commits:
    """The commits of one version on all replicas.

    The commit of an in-place replica begins while the version is being sent, so `begin_in_place` is called on the coordinator's
    worker thread. All other methods are called on the event loop, while no version is being sent.

    `deadline` is the deadline of the sync, and `loop` the event loop that runs the commits.
    """

    def __init__(
        self,
        version: int,
        deadline: Deadline,
        loop: asyncio.AbstractEventLoop,
        roster: Roster,
        queue: MessageQueue,
        hooks: RunHooks,
    ) -> None:
        self._version = version
        self._deadline = deadline
        self._loop = loop
        self._roster = roster
        self._queue = queue
        self._hooks = hooks
        self._running: dict[str, tuple[RosterEntry, Future[CommitReport | WeightlaneError]]] = {}
        self._install_s: dict[str, float] = {}
        """Seconds that each commit took."""
        self._before: dict[str, int] = {}
        """The version that each committed replica served before."""
        self.reports: dict[str, ReplicaReport] = {}
        """Reports of the replicas that have committed the version."""

    @property
    def running(self) -> list[RosterEntry]:
        """The replicas whose commits have begun and were not finished by `finish` yet."""
        return [entry for entry, _ in self._running.values()]

    def begin(self, entry: RosterEntry) -> Future[CommitReport | WeightlaneError]:
        """Start the commit of a replica on the event loop."""
        future = asyncio.run_coroutine_threadsafe(self._commit(entry), self._loop)
        self._running[entry.name] = entry, future
        return future

    def begin_in_place(self, entry: RosterEntry) -> None:
        """Start the commit of a replica that writes buckets as they arrive. If the commit fails, the attempt fails."""
        session = self._queue.session

        def report(ended: Future[CommitReport | WeightlaneError]) -> None:
            if not ended.cancelled() and isinstance(error := ended.result(), WeightlaneError):
                failed = Failed(
                    name=entry.subscribers[0], session=session, version=self._version, error=error.to_wire()
                )
                self._queue.post_to_self(failed)

        self.begin(entry).add_done_callback(report)

    async def wait(self, timeout_s: float) -> None:
        """Return when all running commits have ended, or after `timeout_s` seconds. Cancelling the wait cancels no commit."""
        if futures := [asyncio.wrap_future(future) for _, future in self._running.values()]:
            await asyncio.wait(futures, timeout=timeout_s)

    async def finish(self, timeout_s: float) -> dict[str, ReplicaReport]:
        """Wait for all running commits, cancel those that last longer than `timeout_s` seconds, and update the replicas' states.

        Returns the reports of replicas that failed; those that committed are added to `reports`.
        """
        await self.wait(timeout_s)
        failed: dict[str, ReplicaReport] = {}
        for name, (entry, future) in list(self._running.items()):
            if self._running.pop(name, None) is None:
                continue  # a concurrent call of `finish` has handled it
            if future.cancel() or future.cancelled():
                result: CommitReport | WeightlaneError = QuarantinedError(
                    f"its commit of version {self._version} was interrupted.", part=COORDINATOR, peer=name
                )
            else:
                result = future.result()
            if isinstance(result, WeightlaneError):
                await self._fail(entry, result)
                failed[name] = self.report_without(name, result)
                continue
            self._before[name] = entry.version
            entry.state, entry.version, entry.error = ReplicaState.SERVING, self._version, None
            self.reports[name] = ReplicaReport(
                Outcome.COMMITTED,
                blocked_s=result.blocked_s,
                install_s=self._install_s[name],
                recomputed_tokens=result.recomputed_tokens,
            )
        return failed

    def report_without(self, name: str, error: WeightlaneError | None) -> ReplicaReport:
        """The report of a replica that has not committed the version, because of `error` if that is known."""
        entry = self._roster.entries.get(name)
        state = entry.state if entry is not None else ReplicaState.LOST
        return ReplicaReport(_OUTCOME_OF.get(state, Outcome.BEHIND), error or absent_error(name))

    async def roll_back(self, timeout_s: float) -> None:
        """Roll back every replica that serves the version. A replica that cannot is quarantined, so that it does not serve."""

        async def undo(entry: RosterEntry, before: int) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await entry.replica.rollback(self._version)
                entry.version = before
            except Exception as error:  # noqa: BLE001 - whatever it was, the replica must not serve
                reason = f"version {self._version} could not be rolled back: {error}"
                await self._quarantine(entry, QuarantinedError(reason, part=COORDINATOR, peer=entry.name))

        served = [(self._roster.entries.get(name), before) for name, before in self._before.items()]
        await asyncio.gather(
            *(undo(entry, before) for entry, before in served if entry is not None and entry.version == self._version)
        )

    async def _commit(self, entry: RosterEntry) -> CommitReport | WeightlaneError:
        limit, began = asyncio.timeout(self._deadline.remaining_s), time.perf_counter()
        try:
            async with limit:
                return await entry.replica.commit(self._version)
        except WeightlaneError as error:
            return error
        except Exception as error:  # noqa: BLE001 - one replica's bug must not fail the others
            if isinstance(error, TimeoutError) and limit.expired():  # otherwise the replica has raised it
                what = f"version {self._version} to be committed"
                return self._deadline.error(what, part=COORDINATOR, peer=entry.name)
            return as_weightlane_error(error, entry.name)
        finally:
            self._install_s[entry.name] = time.perf_counter() - began

    async def _fail(self, entry: RosterEntry, error: WeightlaneError) -> None:
        """Update the state of a replica whose commit has failed."""
        if isinstance(error, WorkerDiedError):
            self._roster.mark_lost(entry, error)
        elif not isinstance(error, UntouchedError):
            await self._quarantine(entry, error)

    async def _quarantine(self, entry: RosterEntry, error: WeightlaneError) -> None:
        entry.state, entry.version, entry.error = ReplicaState.QUARANTINED, -1, error
        try:
            async with asyncio.timeout(_QUARANTINE_S):
                await entry.replica.quarantine(error)
        except Exception as failure:  # noqa: BLE001 - it gets no requests in any case
            level = self._queue.warning_level
            _log.log(level, "%s did not acknowledge its quarantine: %s", entry.name, failure)
        facts = {"version": self._version, "error": str(error)}
        self._hooks.replica_quarantined(replica=entry.name, facts=facts)


def commit_error(version: int, failures: Mapping[str, ReplicaReport]) -> WeightlaneError:
    """The error of the only replica that failed in a commit, or one that lists the errors of all."""
    errors = {name: report.error for name, report in failures.items() if report.error is not None}
    if len(errors) == 1:
        return next(iter(errors.values()))
    listed = "; ".join(f"{name}: {error}" for name, error in errors.items())
    return CommitError(
        f"version {version} was staged but not committed by {len(errors)} replicas: {listed}.",
        part=COORDINATOR,
        peer=", ".join(errors),
        hint="The log of each replica says more.",
    )


def absent_error(name: str) -> WeightlaneError:
    """The error of a replica that was never asked to commit the version."""
    return PeerLostError("it took no part: its subscribers have not joined yet.", part=COORDINATOR, peer=name)
