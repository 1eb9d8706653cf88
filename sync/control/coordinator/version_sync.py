"""`VersionSync`: the attempts to get one version staged on enough replicas, and its commits on all of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection
from concurrent.futures import Future

from weightlane.ckpt_engines import (
    CommitError,
    Deadline,
    PeerLostError,
    ProtocolError,
    QuarantinedError,
    QuorumError,
    UntouchedError,
    WeightlaneError,
    WorkerDiedError,
    as_weightlane_error,
)
from weightlane.ckpt_engines.waits import GRACE_S
from weightlane.plugins import RunHooks

from ..messages import COORDINATOR, Abort, Failed
from .blame import AttemptError
from .message_queue import MessageQueue
from .replicas import CommitReport, FailedAttempt, Outcome, ReplicaReport, ReplicaState, Roster, RosterEntry
from .session import Session, Streamed

_log = logging.getLogger(__name__)
_QUARANTINE_S = 10.0
"""Time limit in seconds for a replica to acknowledge its quarantine; it gets no requests in any case."""
INTERRUPTED_S = 60.0
"""Time limit in seconds for an interrupted call, or one whose deadline has passed, to end."""
_OUTCOME_OF = {ReplicaState.LOST: Outcome.LOST, ReplicaState.QUARANTINED: Outcome.QUARANTINED}
"""The outcome on a replica that has not committed, by its state. In any other state the replica is merely behind."""


class VersionSync:
    """The sync of one version until `deadline`, with at most `retries` repetitions after failures that are no replica's fault.

    `stage` runs on the coordinator's worker thread. While the version is being sent, it begins the commits of in-place replicas.
    All other methods are called on the event loop, which runs the commits, while no version is being sent.
    """

    def __init__(
        self,
        version: int,
        deadline: Deadline,
        session: Session,
        queue: MessageQueue,
        roster: Roster,
        retries: int,
        hooks: RunHooks,
    ) -> None:
        self.version = version
        self.started = time.perf_counter()
        self.failures: list[FailedAttempt] = []
        self.excluded: dict[str, WeightlaneError] = {}
        """The replicas that are excluded from the version, with the reasons."""
        self.reports: dict[str, ReplicaReport] = {}
        """Reports of the replicas that have committed the version."""
        self._deadline = deadline
        self._loop = asyncio.get_running_loop()
        self._session = session
        self._queue = queue
        self._roster = roster
        self._retries = retries
        self._hooks = hooks
        self._running: dict[str, tuple[RosterEntry, Future[CommitReport | WeightlaneError]]] = {}
        """Commits that have begun and were not finished by `finish` yet."""
        self._install_s: dict[str, float] = {}
        """Seconds that each commit took."""
        self._before: dict[str, int] = {}
        """The version that each committed replica served before."""

    @property
    def patience_s(self) -> float:
        """Seconds to wait for running commits: the rest of the sync's deadline, and a grace period for commits without one."""
        return self._deadline.remaining_s + GRACE_S

    @property
    def needed(self) -> int:
        """How many more replicas must commit the version for a quorum."""
        entries = self._roster.entries.values()
        have = sum(entry.version == self.version for entry in entries)
        return max(min(1, len(entries)), self._roster.needed - have)

    # -- attempts -----------------------------------------------------------------------------------------------------------

    def stage(self, newest: int) -> Streamed:
        """Send the version until enough replicas have it, and retry after failures that another attempt may avoid.

        Raises the last attempt's error, `QuorumError` when too few replicas can be reached, or `ProtocolError` when the version
        does not follow `newest`, the newest committed one.
        """
        self._roster.apply_changes()
        if not self._session.had_everyone:
            self._queue.wait_for_joined(self._roster.participants(), self._deadline)
        self._queue.catch_up()
        self._check_order(newest)
        targets = self._targets()
        while True:
            try:
                everyone = not self._session.had_everyone
                self._session.ensure_connected(targets, self._deadline, everyone=everyone)
                targets = self._targets()  # connecting may have found that replicas are lost
                streamed = self._session.stream(
                    self.version, targets, self.needed, self._deadline, self._begin_in_place
                )
            except AttemptError as failed:
                self._end_attempt(failed.error)
                if (complete := self._after(failed, targets)) is not None:
                    return complete
                targets = self._targets()
            else:
                self.excluded |= streamed.refused
                return streamed

    def _after(self, failed: AttemptError, targets: Collection[RosterEntry]) -> Streamed | None:
        """Prepare the next attempt. Returns the streamed version if none is needed; raises the error if none would help."""
        left = {entry.name for entry in targets if entry.version != self.version}
        culprits = failed.culprits & left if self._session.had_everyone else frozenset()
        excluded = tuple(culprits) if len(left) - len(culprits) >= max(1, self.needed) else ()
        self.failures.append(FailedAttempt(self._session.name, failed.error, excluded))
        _log.log(self._queue.warning_level, "version %d: %s", self.version, failed.error)
        offer = self._queue.offers.get(self.version)
        if offer is not None and self._all_others_have_it(culprits):
            self.excluded |= dict.fromkeys(culprits, failed.error)
            return Streamed(offer, [], [], [], {})
        if failed.final or self._deadline.expired or not (failed.free_retry or excluded or self._retries):
            raise failed.error from failed
        if excluded and not failed.free_retry:
            self.excluded |= dict.fromkeys(excluded, failed.error)
            self._abort([entry for name, entry in self._roster.entries.items() if name in excluded], failed.error)
        elif not failed.free_retry:
            self._retries -= 1
        return None

    def _check_order(self, newest: int) -> None:
        missing = any(entry.version != self.version for entry in self._roster.entries.values())
        if self.version < newest or (self.version == newest and not missing):
            raise ProtocolError(
                f"version {self.version} was to follow version {newest}.",
                part=COORDINATOR,
                hint="Versions grow with every publication.",
            )

    def _targets(self) -> list[RosterEntry]:
        """The replicas that the next attempt sends the version to. Raises `QuorumError` if they are too few."""
        targets = [
            entry
            for entry in self._roster.reachable()
            if entry.name not in self.excluded and entry.version != self.version
        ]
        if len(targets) < self.needed:
            entries = self._roster.entries
            others = [entry for entry in entries.values() if entry not in targets]
            states = [
                f"{entry.name} is {entry.state}" + (f" ({entry.error})" if entry.error else "") for entry in others
            ]
            raise QuorumError(
                f"{len(targets)} of {len(entries)} replicas can take version {self.version},"
                f" {self._roster.needed} must: {'; '.join(states)}.",
                part=COORDINATOR,
                peer=", ".join(entry.name for entry in others),
                hint="sync.quorum says how many it takes.",
            )
        return targets

    def _end_attempt(self, error: WeightlaneError) -> None:
        """Interrupt in-place commits, which would get no more buckets, and wait for their end.

        A replica that has written only some of the buckets is quarantined.
        """
        self._session.abandon()
        self._abort([entry for entry, _ in self._running.values()], error)
        ending = asyncio.run_coroutine_threadsafe(self.finish(self.patience_s), self._loop)
        ending.result(self._deadline.remaining_s + INTERRUPTED_S)

    def _abort(self, entries: Collection[RosterEntry], error: WeightlaneError) -> None:
        message = Abort(session=self._session.name, version=self.version, error=error.to_wire(), disconnect=True)
        self._queue.post_all([name for entry in entries for name in entry.subscribers], message)

    def _all_others_have_it(self, culprits: Collection[str]) -> bool:
        """Whether the version needs no other attempt: a quorum, and every reachable replica but the culprits, has it."""
        without = {*self.excluded, *culprits}
        return (
            bool(self.reports)
            and sum(entry.version == self.version for entry in self._roster.entries.values()) >= self._roster.needed
            and all(entry.version == self.version or entry.name in without for entry in self._roster.reachable())
        )

    # -- commits ------------------------------------------------------------------------------------------------------------

    def begin_commits(self, entries: Collection[RosterEntry]) -> None:
        """Start the commits of replicas, unless they have begun."""
        for entry in entries:
            if entry.name not in self._running:
                self._begin(entry)

    def _begin(self, entry: RosterEntry) -> Future[CommitReport | WeightlaneError]:
        future = asyncio.run_coroutine_threadsafe(self._commit(entry), self._loop)
        self._running[entry.name] = entry, future
        return future

    def _begin_in_place(self, entry: RosterEntry) -> None:
        """Start the commit of a replica that writes buckets as they arrive. If the commit fails, the attempt fails."""
        session = self._queue.session

        def report(ended: Future[CommitReport | WeightlaneError]) -> None:
            if not ended.cancelled() and isinstance(error := ended.result(), WeightlaneError):
                failed = Failed(name=entry.subscribers[0], session=session, version=self.version, error=error.to_wire())
                self._queue.post_to_self(failed)

        self._begin(entry).add_done_callback(report)

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
                    f"its commit of version {self.version} was interrupted.", part=COORDINATOR, peer=name
                )
            else:
                result = future.result()
            if isinstance(result, WeightlaneError):
                await self._fail(entry, result)
                failed[name] = self.report_without(name, result)
                continue
            if (loss := self._queue.loss_of(entry)) is not None:
                # The version went with the process that had committed it; the process in its place does not have it.
                failed[name] = self.report_without(name, loss)
                continue
            self._before[name] = entry.version
            entry.state, entry.version, entry.error = ReplicaState.SERVING, self.version, None
            self.reports[name] = ReplicaReport(
                Outcome.COMMITTED,
                blocked_s=result.blocked_s,
                install_s=self._install_s[name],
                recomputed_tokens=result.recomputed_tokens,
            )
        return failed

    def report_without(self, name: str, error: WeightlaneError | None) -> ReplicaReport:
        """The report of a replica that has not committed the version because of `error`; without one, it was never asked to."""
        entry = self._roster.entries.get(name)
        state = entry.state if entry is not None else ReplicaState.LOST
        absent = PeerLostError("it took no part: its subscribers have not joined yet.", part=COORDINATOR, peer=name)
        return ReplicaReport(_OUTCOME_OF.get(state, Outcome.BEHIND), error or absent)

    def commit_error(self, failed: dict[str, ReplicaReport]) -> WeightlaneError:
        """The error of the only replica that `failed` in a commit, or one that lists the errors of all."""
        errors = {name: report.error for name, report in failed.items() if report.error is not None}
        if len(errors) == 1:
            return next(iter(errors.values()))
        listed = "; ".join(f"{name}: {error}" for name, error in errors.items())
        return CommitError(
            f"version {self.version} was staged but not committed by {len(errors)} replicas: {listed}.",
            part=COORDINATOR,
            peer=", ".join(errors),
            hint="The log of each replica says more.",
        )

    async def roll_back(self, timeout_s: float) -> None:
        """Roll back every replica that serves the version. A replica that cannot is quarantined, so that it does not serve."""

        async def undo(entry: RosterEntry, before: int) -> None:
            try:
                async with asyncio.timeout(timeout_s):
                    await entry.replica.rollback(self.version)
                entry.version = before
            except Exception as error:  # noqa: BLE001 - whatever it was, the replica must not serve
                reason = f"version {self.version} could not be rolled back: {error}"
                await self._quarantine(entry, QuarantinedError(reason, part=COORDINATOR, peer=entry.name))

        served = [(self._roster.entries.get(name), before) for name, before in self._before.items()]
        await asyncio.gather(
            *(undo(entry, before) for entry, before in served if entry is not None and entry.version == self.version)
        )

    async def _commit(self, entry: RosterEntry) -> CommitReport | WeightlaneError:
        limit, began = asyncio.timeout(self._deadline.remaining_s), time.perf_counter()
        try:
            async with limit:
                return await entry.replica.commit(self.version)
        except WeightlaneError as error:
            return error
        except Exception as error:  # noqa: BLE001 - one replica's bug must not fail the others
            if isinstance(error, TimeoutError) and limit.expired():  # otherwise the replica has raised it
                what = f"version {self.version} to be committed"
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
        facts = {"version": self.version, "error": str(error)}
        self._hooks.replica_quarantined(replica=entry.name, facts=facts)
