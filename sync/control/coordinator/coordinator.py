"""`Coordinator`: brings one version after another from its offer to its commit, or aborts it on every participant."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Self, TypeVar

from weightlane.ckpt_engines import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    SyncAbortedError,
    WeightlaneError,
    as_weightlane_error,
)
from weightlane.ckpt_engines.runtime.threads import DaemonThreads, close_at_exit
from weightlane.plugins import RunHooks, process_hooks

from ...codecs.quantised import QuantisationReport
from ...config import SyncConfig
from ..messages import COORDINATOR, Abort, Committed, Lost
from ..participant import checked_version
from ..rendezvous import Rendezvous
from .blame import AttemptError
from .message_queue import MessageQueue
from .replicas import FailedAttempt, Replica, ReplicaReport, ReplicaState, Roster, SyncReport
from .session import Session, Streamed
from .version_sync import INTERRUPTED_S, VersionSync

_log = logging.getLogger(__name__)
T = TypeVar("T")
_LOOK_AGAIN_S = 0.01
"""Seconds between two checks whether another sync has ended. They are polled, since several event loops share no event."""
_CANCELLED_S = 10.0
"""Seconds that a cancelled sync waits for running commits, because a finished commit can be rolled back."""


class Coordinator:
    """Runs the sync of every version. There is one per run, in the process that hosts the rendezvous.

    A version is sent to every reachable replica. A replica that fails keeps its current version, or is quarantined if it cannot
    prove which weights it holds. The others continue while they are enough for a quorum (`SyncConfig.quorum`). A replica that
    missed a version takes part again in the next.

    Args:
        rendezvous: The hosted rendezvous.
        publishers: Names of the trainer ranks' publishers, in rank order; the first one makes the offers.
        replicas: The rollout replicas; others may join (`add`) and leave (`remove`) later.
        config: Deadlines and quorum.
        hooks: Observers; those of this process by default.
    """

    def __init__(
        self,
        rendezvous: Rendezvous,
        publishers: Sequence[str],
        replicas: Sequence[Replica],
        config: SyncConfig,
        hooks: RunHooks | None = None,
    ) -> None:
        self._rendezvous = rendezvous
        self._roster = Roster(publishers, replicas, config.quorum)
        self._queue = MessageQueue(rendezvous, self._roster)
        self._session = Session(self._queue, self._roster, config)
        self._config = config
        self._hooks = hooks or process_hooks()
        self._committed = -1
        """The newest committed version."""
        self._process = os.getpid()
        self._turn = threading.Lock()
        """Held during a sync or a `connect`."""
        self._threads = DaemonThreads(1, "weightlane-coordinate")
        """The worker thread: the event loop's executor may be busy with other work."""
        close_at_exit(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def connect(self) -> None:
        """Wait for every participant and connect their links.

        Raises `DeadlineExceededError` naming the missing participants, or the error of the participant that failed.
        """
        deadline = Deadline.after(self._config.connect_timeout_s)
        await self._take_turn(deadline)
        try:
            await self._run(deadline, self._connect, deadline)
        except BaseException as cause:
            error = _typed("connecting", cause)
            self._abort(-1, error)
            if isinstance(cause, Exception) and error is not cause:
                raise error from cause
            raise
        finally:
            self._end_turn()

    async def sync(self, version: int) -> SyncReport:
        """Bring `version`, which every publisher has published or is about to publish, into service.

        The committed version may be synced again: it is then sent to the replicas that do not have it. A sync that is called
        during another one waits until the other one has ended, within its own deadline.

        A cancelled sync is aborted on every participant, like a failed one, before `asyncio.CancelledError` is raised. Once every
        replica's commit has ended, a cancellation has no effect on the version.

        Raises `SyncAbortedError` if too few replicas could commit the version. Every replica that serves then serves the old
        version, and every participant gets the same error. Raises `ConfigError` unless `version` is an integer from 0 on.
        """
        version = checked_version(version, COORDINATOR)
        deadline = Deadline.after(self._config.deadline_s)
        try:
            await self._take_turn(deadline)
        except WeightlaneError as error:  # the sync has not begun, so no other participant gets the error
            raise SyncAbortedError.because(version, error) from error
        try:
            return await self._sync(version, deadline)
        finally:
            self._end_turn()

    async def _sync(self, version: int, deadline: Deadline) -> SyncReport:
        sync = VersionSync(
            version, deadline, self._session, self._queue, self._roster, self._config.retries, self._hooks
        )
        self._hooks.version_opened(version=version, facts={"replicas": list(self._roster.entries)})
        try:
            streamed = await self._run(deadline, sync.stage, self._committed)
            sync.begin_commits(streamed.replicas)
            await sync.wait(sync.patience_s)
        except BaseException as cause:
            error = _typed(f"the sync of version {version}", cause)
            patience_s = sync.patience_s if isinstance(cause, Exception) else _CANCELLED_S
            await run_to_end(self._give_up(sync, error, patience_s))
            if isinstance(cause, Exception):
                raise SyncAbortedError.because(version, error) from cause
            raise
        return await run_to_end(self._conclude(streamed, sync))

    async def _conclude(self, streamed: Streamed, sync: VersionSync) -> SyncReport:
        """Decide whether enough replicas have committed the version, and send every participant the outcome."""
        try:
            reports = await self._reports(streamed, sync)
        except Exception as cause:
            error = _typed(f"the sync of version {sync.version}", cause)
            await self._give_up(sync, error, patience_s=0.0)
            raise SyncAbortedError.because(sync.version, error) from cause
        quantised = [QuantisationReport(*message.error) for message in streamed.sent if message.error is not None]
        report = SyncReport(
            version=sync.version,
            latency_s=time.perf_counter() - sync.started,
            sent_bytes=sum(message.nbytes for message in streamed.sent),
            export_s=max((message.export_s for message in streamed.sent), default=0.0),
            codec=str(streamed.offer.manifest.get("codec", "")),
            codec_reason=streamed.offer.reason,
            quantisation=sum(quantised, QuantisationReport()) if quantised else None,
            replicas=reports,
            session=self._session.name,
            failures=tuple(sync.failures),
        )
        self._announce(report)
        return report

    async def _reports(self, streamed: Streamed, sync: VersionSync) -> dict[str, ReplicaReport]:
        """The report of every replica once all commits have ended. Raises the commits' error if too few have succeeded."""
        needed = sync.needed
        failed = await sync.finish(timeout_s=0.0)
        excluded = {name: sync.report_without(name, error) for name, error in sync.excluded.items()}
        reports = excluded | sync.reports | failed
        for entry in streamed.replicas:
            staged = [message for message in streamed.staged if message.name in entry.subscribers]
            staged_s, nbytes = max(message.seconds for message in staged), sum(message.nbytes for message in staged)
            reports[entry.name] = replace(reports[entry.name], staged_s=staged_s, nbytes=nbytes)
        for name, entry in self._roster.entries.items():
            if name not in reports and entry.version != sync.version:
                reports[name] = sync.report_without(name, entry.error)
        if failed:
            error = sync.commit_error(failed)
            sync.failures.append(FailedAttempt(self._session.name, error, tuple(failed)))
            if len(streamed.replicas) - len(failed) < needed:
                raise error
        return reports

    async def _give_up(self, sync: VersionSync, error: WeightlaneError, patience_s: float) -> None:
        """Abort the version on every participant, and roll it back on replicas that already serve it."""
        self._abort(sync.version, error)
        await sync.finish(patience_s)
        await sync.roll_back(self._config.deadline_s)
        facts = {
            "error": str(error),
            "seconds": time.perf_counter() - sync.started,
            "failures": [failure.to_plain() for failure in sync.failures],
        }
        self._hooks.version_aborted(version=sync.version, facts=facts)

    async def abort(self, version: int, error: WeightlaneError) -> None:
        """Abort `version` on every participant because of `error`, instead of a `sync`. Waits for a running one."""
        await self._take_turn(Deadline.after(self._config.deadline_s))
        try:
            self._abort(version, error)
        finally:
            self._end_turn()

    def add(self, replica: Replica) -> None:
        """Add a replica to the run. It takes part from the next `sync` on, once its subscribers have joined. Never waits.

        Until it has committed a version its state is `ReplicaState.JOINING`, and it must get no requests.
        Raises `ConfigError` if its name, or the name of one of its subscribers, is taken.
        """
        self._roster.add(replica)
        self._change_roster()

    def remove(self, name: str) -> None:
        """Remove a replica from the run: from the next `sync` on it does not count for the quorum. Never waits.

        Raises `ConfigError` if there is no replica of that name.
        """
        self._roster.remove(name)
        self._change_roster()

    def _change_roster(self) -> None:
        """Apply changes of the roster now, or at the end of the running sync or `connect`."""
        if self._turn.acquire(blocking=False):
            try:
                self._roster.apply_changes()
            finally:
                self._turn.release()

    def weights_lost(self, name: str) -> None:
        """Note that a replica has given up its weights, and must get no requests until it has committed a version.

        The newest version is then sent to it by the next `sync`, also if it had that. Not to be called during a `sync`.
        """
        self._roster.note_weights_lost(name)

    def states(self) -> dict[str, ReplicaState]:
        """The state of every replica by name. Only those that are `SERVING` may get requests.

        Messages about dead processes are read at the next `sync`; a program that watches the processes knows earlier.
        """
        return {name: entry.state for name, entry in self._roster.entries.items()}

    def participant_lost(self, error: WeightlaneError, replica: str = "") -> None:
        """Report a dead process to the running sync, which would otherwise notice it at its deadline.

        Args:
            error: The cause of the death.
            replica: Name of the replica whose process died; empty for a trainer, without which no version can be sent.
        """
        self._rendezvous.post(COORDINATOR, Lost(replica=replica, error=error.to_wire()))

    def wait_until_left(self, timeout_s: float) -> None:
        """After `close`, wait until every trainer rank has learned of it and left, for at most `timeout_s`. Never raises.

        For programs that are about to close the rendezvous: messages that were not read are lost then.
        """
        if late := self._queue.wait_until_left(self._roster.publishers, Deadline.after(timeout_s)):
            _log.info("%s had not left %.0f s after the end of the run", ", ".join(late), timeout_s)

    def close(self) -> None:
        """Stop every participant's control thread and end a running sync. Idempotent."""
        if self._queue.closed or self._process != os.getpid():
            return
        self._queue.close()
        self._threads.shutdown()

    async def _run(self, deadline: Deadline, call: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking `call` on the worker thread; it must end by `deadline`. Cancelling this task interrupts it."""
        if self._queue.closed:
            raise ClosedError("the coordinator was closed.", part=COORDINATOR)
        self._queue.interruption = None
        running = self._threads.submit(call, *arguments)
        ended = asyncio.wrap_future(running)
        try:
            await asyncio.wait({ended}, timeout=deadline.remaining_s + INTERRUPTED_S)
        except asyncio.CancelledError:
            if not running.cancel():
                self._queue.interrupt(ClosedError("the call was cancelled.", part=COORDINATOR))
                await run_to_end(asyncio.wait({ended}, timeout=INTERRUPTED_S))
                if ended.done() and not ended.cancelled():
                    ended.exception()  # retrieved, so that Python does not log it
            raise
        if not ended.done():
            running.cancel()
            raise DeadlineExceededError(
                "a call on the coordinator's thread has not ended in time.",
                part=COORDINATOR,
                hint="The process that runs the coordinator may be stuck; end the run and start it again.",
            )
        return ended.result()

    async def _take_turn(self, deadline: Deadline) -> None:
        while not self._turn.acquire(blocking=False):
            if deadline.expired:
                raise deadline.error("the sync before to end", part=COORDINATOR)
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _end_turn(self) -> None:
        self._turn.release()
        self._change_roster()

    def _connect(self, deadline: Deadline) -> None:
        """[worker thread] Connect all participants."""
        self._roster.apply_changes()
        self._queue.wait_for_joined(self._roster.participants(), deadline)
        try:
            self._session.ensure_connected(self._roster.reachable(), deadline, everyone=True)
        except AttemptError as failed:
            raise failed.error from failed

    def _announce(self, report: SyncReport) -> None:
        """Send every participant `Committed`, or `Abort` if its replica has not committed the version."""
        version, session = report.version, self._session.name
        self._committed = max(self._committed, version)
        serving = [*self._roster.publishers]
        for name, part in report.replicas.items():
            entry = self._roster.entries.get(name)
            if entry is None:
                continue
            if part.error is None:
                serving += entry.subscribers
            else:
                verdict = Abort(session=session, version=version, error=part.error.to_wire(), disconnect=False)
                self._queue.post_all(entry.subscribers, verdict)
        self._queue.post_all(serving, Committed(session=session, version=version))
        self._hooks.version_committed(version=version, facts=report.facts())

    def _abort(self, version: int, error: WeightlaneError) -> None:
        """Have every participant drop `version` and the connection; the next sync starts a new session."""
        self._session.abandon()
        _log.log(self._queue.warning_level, "version %d aborted: %s", version, error)
        message = Abort(session=self._session.name, version=version, error=error.to_wire(), disconnect=True)
        self._queue.post_all(self._roster.participants(), message)
        self._rendezvous.forget_session(self._session.name)  # so that nobody waits there for an address or a plan


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even if the caller is cancelled in the meantime; the cancellation is raised afterwards."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # retrieved, so that Python does not log it
        raise cancelled
    return task.result()


def _typed(what: str, cause: BaseException) -> WeightlaneError:
    """The error that participants get if `what` has failed with `cause` or was cancelled."""
    if isinstance(cause, Exception):
        return as_weightlane_error(cause, COORDINATOR)
    return ClosedError(f"{what} was cancelled.", part=COORDINATOR)
