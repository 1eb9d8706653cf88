"""`Coordinator`: takes one version after another from offered to committed, or aborts it everywhere."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Self, TypeVar

from weightlane.ckpt_engines import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    ProtocolError,
    QuarantinedError,
    QuorumError,
    SyncAbortedError,
    UntouchedError,
    WeightlaneError,
    WorkerDiedError,
    as_weightlane_error,
)
from weightlane.ckpt_engines.links.bounded_calls import GRACE_S
from weightlane.ckpt_engines.runtime.at_exit import close_at_exit
from weightlane.ckpt_engines.runtime.daemon_threads import DaemonThreads
from weightlane.plugins import RunHooks, process_hooks

from .config import SyncConfig
from .control.async_waits import to_its_end, wait_for_end
from .control.commits import Commits, named_failure, not_there
from .control.hub.hub import COORDINATOR
from .control.message_queue import MessageQueue, TroubleError
from .control.messages import Abort, Committed, Failed, Lost, Stop
from .control.rendezvous import Rendezvous
from .control.roster import Replica, ReplicaState, Roster, RosterEntry
from .control.session import Session, Streamed
from .report import CommitOutcome, FailedAttempt, Outcome, ReplicaReport, SyncReport
from .send.publication import checked_version

T = TypeVar("T")
_log = logging.getLogger(__name__)
_QUARANTINE_S = 10.0
_LOOK_AGAIN_S = 0.01
_CLEAN_UP_S = 60.0
"""Most seconds that an interrupted call may go on after the sync's deadline."""
_CANCELLED_S = 10.0
"""How long a sync that was cancelled lets commits go on that are under way: one that ends can be taken back."""


@dataclass(slots=True)
class _Tally:
    """What has happened to a version so far."""

    version: int
    deadline: Deadline
    started: float = field(default_factory=time.perf_counter)
    failures: list[FailedAttempt] = field(default_factory=list)
    excluded: dict[str, WeightlaneError] = field(default_factory=dict)
    """Replicas the version goes on without, and why."""
    commits: Commits = field(init=False)

    def __post_init__(self) -> None:
        self.commits = Commits(self.version)

    @property
    def patience_s(self) -> float:
        """How long commits may still take: they end by the sync's deadline, unless they know none."""
        return self.deadline.remaining_s + GRACE_S


class Coordinator:
    """Runs the life of every version. One per run, in the process that hosts the rendezvous.

    A version is carried to every replica that can be reached. One that fails is left behind with the version it has, or
    quarantined if it cannot prove what it holds, and the others go on as long as there are enough of them
    (`SyncConfig.quorum`). Whoever missed a version takes part again in the next.

    Args:
        rendezvous: The hosted store.
        publishers: Names of the trainer ranks' publishers, in rank order; the first one sends.
        replicas: The rollout replicas; more may come (`add`) and go (`remove`).
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
        self._letters = MessageQueue(rendezvous, self._roster)
        self._connection = Session(self._letters, self._roster, config)
        self._config = config
        self._hooks = hooks or process_hooks()
        self._committed = -1
        self._met = False
        """Whether everybody has been there once: before that nobody may be missing."""
        self._closed = False
        self._process = os.getpid()
        self._turn = threading.Lock()
        """Held from the start of a sync to its very end."""
        self._threads = DaemonThreads(1, "weightlane-coordinate")
        """For what blocks, one at a time; the event loop's own may be busy with whatever else the program does."""
        close_at_exit(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def connect(self) -> None:
        """Wait for every participant and connect their transports.

        Raises `DeadlineExceededError` naming who is missing, or the error of the participant that failed.
        """
        deadline = Deadline.after(self._config.connect_timeout_s)
        await self._take_turn(deadline)
        try:
            await self._aside(deadline, self._connect, deadline)
        except BaseException as cause:
            error = _reason("connecting", cause)
            self._abort(-1, error)
            if isinstance(cause, Exception) and error is not cause:
                raise error from cause
            raise
        finally:
            self._end_turn()

    async def sync(self, version: int) -> SyncReport:
        """Carry `version`, which every publisher has published or is about to, into service.

        The committed version may be asked for again: it then goes to the replicas that do not have it. A sync that comes
        while another one is under way waits for its end, within its own deadline.

        A sync that is cancelled is aborted on every side, as one that fails is, before `asyncio.CancelledError` goes on; once
        every replica's commit has ended it is too late for that, and the version counts as if nobody had cancelled.

        Raises `SyncAbortedError` when too few replicas could take it; the old version serves then on every replica that
        serves, and every participant gets the same error; `ConfigError` for a `version` that is no whole number from 0.
        """
        version = checked_version(version, COORDINATOR)
        deadline = Deadline.after(self._config.deadline_s)
        try:
            await self._take_turn(deadline)
        except WeightlaneError as error:  # nothing has begun, and what is under way is another version's
            raise SyncAbortedError.because(version, error) from error
        try:
            return await self._carry(version, deadline)
        finally:
            self._end_turn()

    async def _carry(self, version: int, deadline: Deadline) -> SyncReport:
        tally = _Tally(version, deadline)
        self._hooks.version_opened(version=version, facts={"replicas": list(self._roster.members)})
        try:
            streamed = await self._aside(deadline, self._stage, tally, deadline, asyncio.get_running_loop())
            await self._commit(streamed, tally, deadline)
        except BaseException as cause:
            error = _reason(f"the sync of version {version}", cause)
            patience = tally.patience_s if isinstance(cause, Exception) else _CANCELLED_S
            await to_its_end(self._give_up(tally, error, patience))
            if isinstance(cause, Exception):
                raise SyncAbortedError.because(version, error) from cause
            raise
        return await to_its_end(self._conclude(streamed, tally))

    async def _conclude(self, streamed: Streamed, tally: _Tally) -> SyncReport:
        """All commits have ended: say what that makes of the version, and see to it that it is so everywhere."""
        try:
            reports = await self._judge(streamed, tally)
        except Exception as cause:
            error = _reason(f"the sync of version {tally.version}", cause)
            await self._give_up(tally, error, patience_s=0.0)
            raise SyncAbortedError.because(tally.version, error) from cause
        report = SyncReport(
            version=tally.version,
            latency_s=time.perf_counter() - tally.started,
            sent_bytes=sum(message.nbytes for message in streamed.sent),
            codec=str(streamed.offer.manifest.get("codec", "")),
            codec_reason=streamed.offer.reason,
            quantisation=streamed.quantisation,
            replicas=reports,
            session=self._connection.session,
            failures=tuple(tally.failures),
        )
        self._announce(report)
        return report

    async def _give_up(self, tally: _Tally, error: WeightlaneError, patience_s: float) -> None:
        """Everybody learns that the version ends with `error`; who serves it already takes it back."""
        version, commits = tally.version, tally.commits
        self._abort(version, error)
        await commits.end(lambda member, failure: self._settle(member, failure, version), patience_s)
        had = [member for name in commits.before if (member := self._roster.members.get(name)) is not None]
        await self._roll_back([member for member in had if member.version == version], version, commits.before)
        facts = {
            "error": str(error),
            "seconds": time.perf_counter() - tally.started,
            "failures": [failure.to_plain() for failure in tally.failures],
        }
        self._hooks.version_aborted(version=version, facts=facts)

    def add(self, replica: Replica) -> None:
        """A replica joins the run. It takes part from the next `sync` on, once its subscribers have joined.

        It is `ReplicaState.JOINING`, and must get no requests, until a version has been committed on it. Never waits.
        Raises `ConfigError` when its name, or one of its subscribers', is taken.
        """
        self._roster.add(replica)
        self._settle_roster()

    def remove(self, name: str) -> None:
        """A replica leaves the run for good: from the next `sync` on it does not count for the quorum. Never waits.

        Raises `ConfigError` when there is none of that name.
        """
        self._roster.remove(name)
        self._settle_roster()

    def _settle_roster(self) -> None:
        """Make changes of the roster now unless a version is under way, which then does so when it ends."""
        if self._turn.acquire(blocking=False):
            try:
                self._roster.settle()
            finally:
                self._turn.release()

    def states(self) -> dict[str, ReplicaState]:
        """The state of every replica by name. Only those that are `SERVING` may get requests.

        News of a death is read at the next `sync`: whoever watches the processes knows earlier.
        """
        return {name: member.state for name, member in dict(self._roster.members).items()}

    def participant_lost(self, error: WeightlaneError, replica: str = "") -> None:
        """Whoever watches the processes says that one is gone: a sync under way learns it now, not at its deadline.

        Args:
            error: What happened.
            replica: Name of the replica that died; empty for a trainer, without which a version cannot be sent.
        """
        self._rendezvous.post(COORDINATOR, Lost(replica=replica, error=error.to_wire()))

    def wait_until_heard(self, timeout_s: float) -> None:
        """Return when every trainer has read how the versions ended, or after `timeout_s` if one has died. Never raises.

        For programs that end and take the store with them: what nobody has read then is lost.
        """
        if deaf := self._letters.wait_until_read(self._roster.publishers, Deadline.after(timeout_s)):
            _log.info("%s did not read how the last version ended within %.0f s", ", ".join(deaf), timeout_s)

    def close(self) -> None:
        """Stop every participant's control thread and end a sync that is under way. Idempotent."""
        if self._closed or self._process != os.getpid():
            return
        self._closed = True
        try:
            self._letters.post_all(self._roster.everyone(), Stop())
            self._rendezvous.post(COORDINATOR, Stop())
        except WeightlaneError:
            _log.debug("the store was gone before close")
        self._threads.shutdown()

    async def _take_turn(self, deadline: Deadline) -> None:
        """Wait for the end of the sync before: syncs of several event loops may meet here."""
        while not self._turn.acquire(blocking=False):
            if deadline.expired:
                raise deadline.error("the sync before to end", part=COORDINATOR)
            await asyncio.sleep(_LOOK_AGAIN_S)

    def _end_turn(self) -> None:
        self._turn.release()
        self._settle_roster()

    async def _aside(self, deadline: Deadline, call: Callable[..., T], *arguments: Any) -> T:
        """Run what blocks on the coordinator's thread. It ends with `deadline` by itself; when cancelled it is interrupted."""
        if self._closed:
            raise ClosedError("the coordinator was closed.", part=COORDINATOR)
        self._letters.interruption = None
        running = self._threads.submit(call, *arguments)
        ended = asyncio.wrap_future(running)
        try:
            await asyncio.wait({ended}, timeout=deadline.remaining_s + _CLEAN_UP_S)
        except asyncio.CancelledError as cancelled:
            if not running.cancel():
                error = _reason("this", cancelled)
                self._letters.interruption = error
                with suppress(WeightlaneError):  # The store is gone: nobody waits for mail any more.
                    self._rendezvous.post(COORDINATOR, Lost(replica="", error=error.to_wire()))
                await to_its_end(wait_for_end(ended, _CLEAN_UP_S))
            raise
        if not ended.done():
            running.cancel()
            raise DeadlineExceededError(
                "what goes on in the coordinator's own thread has not ended in time.",
                part=COORDINATOR,
                hint="The process that runs the coordinator may be stuck; end the run and start it again.",
            )
        return ended.result()

    # -- blocking parts, one at a time, on a worker thread --------------------------------------------------------------

    def _connect(self, deadline: Deadline) -> None:
        self._roster.settle()
        self._letters.wait_for_joined(self._roster.everyone(), deadline)
        try:
            self._connection.ensure(self._roster.reachable(), deadline, everyone=True)
        except TroubleError as trouble:
            raise trouble.error from trouble
        self._met = True

    def _stage(self, tally: _Tally, deadline: Deadline, loop: asyncio.AbstractEventLoop) -> Streamed:
        """Try until the version is staged on enough replicas, or nothing more can be done."""
        self._roster.settle()
        if not self._met:
            self._letters.wait_for_joined(self._roster.everyone(), deadline)
        self._letters.catch_up()
        targets = self._targets(tally)
        retries = self._config.retries
        while True:
            try:
                self._connection.ensure(targets, deadline, everyone=not self._met)
                self._met = True
                # Connecting may have found that somebody is gone.
                targets = self._targets(tally)
                needed = self._needed(tally.version)
                streamed = self._connection.stream(
                    tally.version,
                    targets,
                    needed,
                    deadline,
                    lambda member: self._begin(member, tally, deadline, loop),
                )
            except TroubleError as trouble:
                self._connection.give_up()
                offer = self._letters.offers.get(tally.version)
                self._interrupt(tally, trouble.error)
                ending = asyncio.run_coroutine_threadsafe(self._end_early(tally), loop)
                ending.result(deadline.remaining_s + _CLEAN_UP_S)
                targets = [member for member in targets if member.version != tally.version]
                exclude = trouble.culprits & {member.name for member in targets if self._met}
                spared = len(targets) - len(exclude) >= max(1, self._needed(tally.version))
                tally.failures.append(
                    FailedAttempt(self._connection.session, trouble.error, tuple(exclude if spared else ()))
                )
                self._warn("version %d: %s", tally.version, trouble.error)
                if offer is not None and self._enough_have(tally, exclude):
                    tally.excluded |= dict.fromkeys(exclude, trouble.error)
                    return Streamed(offer, [], [], [], {})
                may_go_on = trouble.again or (exclude and spared) or retries
                if trouble.hopeless or deadline.expired or not may_go_on:
                    raise trouble.error from trouble
                if trouble.again:
                    pass
                elif exclude and spared:
                    tally.excluded |= dict.fromkeys(exclude, trouble.error)
                    self._dismiss(exclude, tally.version, trouble.error)
                else:
                    retries -= 1
                targets = self._targets(tally)
            else:
                tally.excluded |= streamed.refused
                return streamed

    def _targets(self, tally: _Tally) -> list[RosterEntry]:
        """Who is to get the version now. `QuorumError` when they are too few, `ProtocolError` for an old version."""
        version = tally.version
        everybody_has_it = all(member.version == version for member in self._roster.members.values())
        if version < self._committed or (version == self._committed and everybody_has_it):
            raise ProtocolError(
                f"version {version} was to follow version {self._committed}.",
                part="coordinator",
                hint="Versions grow with every publication.",
            )
        members = [
            member
            for member in self._roster.reachable()
            if member.name not in tally.excluded and member.version != version
        ]
        if len(members) < self._needed(version):
            absent = [
                f"{member.name} is {member.state}" + (f" ({member.error})" if member.error else "")
                for member in self._roster.members.values()
                if member not in members
            ]
            raise QuorumError(
                f"{len(members)} of {len(self._roster.members)} replicas can take version {version},"
                f" {self._roster.needed} must: {'; '.join(absent)}.",
                part="coordinator",
                peer=", ".join(name for name in self._roster.members if name not in {m.name for m in members}),
                hint="sync.quorum says how many it takes.",
            )
        return members

    def _needed(self, version: int) -> int:
        """How many more replicas must take the version for it to count."""
        have = sum(member.version == version for member in self._roster.members.values())
        return max(min(1, len(self._roster.members)), self._roster.needed - have)

    def _dismiss(self, replicas: Iterable[str], version: int, error: WeightlaneError) -> None:
        """The version goes on without these, which may be blocked in it."""
        message = Abort(session=self._connection.session, version=version, error=error.to_wire(), disconnect=True)
        for name in replicas:
            if member := self._roster.members.get(name):
                self._letters.post_all(member.names, message)

    # -- versions that are taken in place -------------------------------------------------------------------------------

    def _begin(self, member: RosterEntry, tally: _Tally, deadline: Deadline, loop: asyncio.AbstractEventLoop) -> None:
        """A replica takes the version in place: its commit goes on while the version is sent."""
        version, session = tally.version, self._connection.session

        def tell(error: WeightlaneError) -> None:
            """A commit that fails must not leave the others waiting for buckets."""
            with suppress(WeightlaneError):  # The store is gone, and with it everybody.
                failed = Failed(name=member.names[0], session=session, version=version, error=error.to_wire())
                self._rendezvous.post(COORDINATOR, failed)

        tally.commits.begin(member, self._commit_one(member, version, deadline), loop, tell)

    def _interrupt(self, tally: _Tally, error: WeightlaneError) -> None:
        """What commits that are under way wait for will not come."""
        session, version = self._connection.session, tally.version
        verdict = Abort(session=session, version=version, error=error.to_wire(), disconnect=True)
        for member in tally.commits.members:
            self._letters.post_all(member.names, verdict)

    async def _end_early(self, tally: _Tally) -> None:
        """Wait for commits that were interrupted. Whoever has written something, and not everything, is quarantined."""
        await tally.commits.end(lambda member, error: self._settle(member, error, tally.version), tally.patience_s)

    def _enough_have(self, tally: _Tally, exclude: Iterable[str]) -> bool:
        """Whether the version counts although an attempt failed, because everybody but the culprits has it already."""
        have = [member for member in self._roster.members.values() if member.version == tally.version]
        gone = {*tally.excluded, *exclude}
        left = [member for member in self._roster.reachable() if member.name not in gone]
        return (
            bool(tally.commits.reports) and len(have) >= self._roster.needed and all(member in have for member in left)
        )

    # -- commit ---------------------------------------------------------------------------------------------------------

    async def _commit(self, streamed: Streamed, tally: _Tally, deadline: Deadline) -> None:
        """Have everybody who has the version staged put it into service; returns when all have ended, in whatever way."""
        loop = asyncio.get_running_loop()
        under_way = tally.commits.members
        for member in streamed.members:
            if member not in under_way:
                tally.commits.begin(member, self._commit_one(member, tally.version, deadline), loop)
        await tally.commits.wait(tally.patience_s)

    async def _judge(self, streamed: Streamed, tally: _Tally) -> dict[str, ReplicaReport]:
        """What became of every replica. Takes the version back, and raises, when too few have taken it."""
        version, members, commits = tally.version, streamed.members, tally.commits
        needed = self._needed(version)
        failures: dict[str, WeightlaneError] = {}
        outcomes: dict[str, Outcome] = {}

        async def settle(member: RosterEntry, error: WeightlaneError) -> None:
            failures[member.name] = error
            outcomes[member.name] = await self._settle(member, error, version)

        await commits.end(settle, patience_s=0.0)
        reports = {name: self._left_behind(name, error) for name, error in tally.excluded.items()} | commits.reports
        for member in members:
            mine = [message for message in streamed.staged if message.name in member.names]
            staged_s, nbytes = max(message.seconds for message in mine), sum(message.nbytes for message in mine)
            if (failure := failures.get(member.name)) is not None:
                reports[member.name] = ReplicaReport(outcomes[member.name], failure, staged_s=staged_s, nbytes=nbytes)
            else:
                reports[member.name] = replace(reports[member.name], staged_s=staged_s, nbytes=nbytes)
        reports |= {
            name: self._left_behind(name, member.error)
            for name, member in dict(self._roster.members).items()
            if name not in reports and member.version != version
        }
        if failures:
            error = named_failure(version, failures)
            tally.failures.append(FailedAttempt(self._connection.session, error, tuple(failures)))
            if len(members) - len(failures) < needed:
                raise error
        return reports

    async def _commit_one(
        self, member: RosterEntry, version: int, deadline: Deadline
    ) -> CommitOutcome | WeightlaneError:
        limit = asyncio.timeout(deadline.remaining_s)
        try:
            async with limit:
                return await member.replica.commit(version)
        except WeightlaneError as error:
            return error
        except Exception as error:  # noqa: BLE001 - one replica's bug must not take the others along
            if isinstance(error, TimeoutError) and limit.expired():  # else it is the replica's own
                return deadline.error(f"version {version} to be committed", part="coordinator", peer=member.name)
            return as_weightlane_error(error, member.name)

    async def _settle(self, member: RosterEntry, error: WeightlaneError, version: int) -> Outcome:
        """What a replica that failed in a commit is now."""
        if isinstance(error, WorkerDiedError):
            self._roster.lost(member, error)
            return Outcome.LOST
        if not isinstance(error, UntouchedError):
            await self._quarantine(member, error, version)
        elif member.state is ReplicaState.SERVING:
            return Outcome.BEHIND
        return self._left_behind(member.name, error).outcome

    async def _quarantine(self, member: RosterEntry, error: WeightlaneError, version: int) -> None:
        member.state, member.version, member.error = ReplicaState.QUARANTINED, -1, error
        try:
            async with asyncio.timeout(_QUARANTINE_S):
                await member.replica.quarantine(error)
        except Exception as trouble:  # noqa: BLE001 - it gets no requests in any case
            self._warn("%s could not be told of its quarantine: %s", member.name, trouble)
        self._hooks.replica_quarantined(replica=member.name, facts={"version": version, "error": str(error)})

    async def _roll_back(self, members: Sequence[RosterEntry], version: int, before: Mapping[str, int]) -> None:
        """Take `version` back where it serves already. A replica that cannot is quarantined: no two versions serve."""

        async def undo(member: RosterEntry) -> None:
            try:
                async with asyncio.timeout(self._config.deadline_s):
                    await member.replica.rollback(version)
                member.version = before[member.name]
            except Exception as error:  # noqa: BLE001 - whatever it was, the replica must not serve
                reason = QuarantinedError(
                    f"version {version} could not be taken back: {error}", part="coordinator", peer=member.name
                )
                await self._quarantine(member, reason, version)

        await asyncio.gather(*(undo(member) for member in members))

    def _left_behind(self, name: str, error: WeightlaneError | None) -> ReplicaReport:
        member = self._roster.members.get(name)
        outcomes = {ReplicaState.LOST: Outcome.LOST, ReplicaState.QUARANTINED: Outcome.QUARANTINED}
        state = member.state if member is not None else ReplicaState.LOST
        return ReplicaReport(outcomes.get(state, Outcome.BEHIND), error or not_there(name))

    # -- verdicts -------------------------------------------------------------------------------------------------------

    def _announce(self, report: SyncReport) -> None:
        """Everybody learns what became of the version."""
        version, session = report.version, self._connection.session
        self._committed = max(self._committed, version)
        try:
            serving = [*self._roster.publishers]
            for name, part in report.replicas.items():
                member = self._roster.members.get(name)
                if member is None:
                    continue
                if part.outcome is Outcome.COMMITTED:
                    serving += member.names
                else:
                    reason = part.error or not_there(name)
                    verdict = Abort(session=session, version=version, error=reason.to_wire(), disconnect=False)
                    self._letters.post_all(member.names, verdict)
            self._letters.post_all(serving, Committed(session=session, version=version))
        except WeightlaneError:
            self._warn("the store is gone; participants learn of version %d by their own deadlines", version)
        self._hooks.version_committed(version=version, facts=report.facts())

    def _abort(self, version: int, error: WeightlaneError) -> None:
        """Everybody drops `version` and the connection; the next sync connects anew."""
        self._connection.give_up()
        self._warn("version %d aborted: %s", version, error)
        message = Abort(session=self._connection.session, version=version, error=error.to_wire(), disconnect=True)
        try:
            self._letters.post_all(self._roster.everyone(), message)
        except WeightlaneError:
            self._warn("the store is gone; participants learn of the abort by their own deadlines")

    def _warn(self, text: str, *facts: object) -> None:
        """Log a warning. Whoever has closed the coordinator meanwhile need not be told that things end early."""
        _log.log(logging.DEBUG if self._closed else logging.WARNING, text, *facts)


def _reason(what: str, cause: BaseException) -> WeightlaneError:
    """What everybody is told of the end of `what`."""
    if isinstance(cause, Exception):
        return as_weightlane_error(cause, COORDINATOR)
    return ClosedError(f"{what} was cancelled.", part=COORDINATOR)
