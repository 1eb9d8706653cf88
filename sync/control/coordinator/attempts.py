"""`Attempts`: the coordinator's attempts to get one version staged on enough replicas."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection

from weightlane.ckpt_engines import Deadline, ProtocolError, QuorumError, WeightlaneError
from weightlane.ckpt_engines.links.bounded_calls import GRACE_S
from weightlane.plugins import RunHooks

from ...config import SyncConfig
from ..messages import COORDINATOR, Abort
from .commits import Commits
from .message_queue import MessageQueue
from .replies import AttemptError
from .report import FailedAttempt
from .roster import Roster, RosterEntry
from .session import Session, Streamed

_log = logging.getLogger(__name__)
INTERRUPTED_S = 60.0
"""Time limit in seconds for an interrupted call, or one whose deadline has passed, to end."""


class Attempts:
    """The attempts at one version until `deadline`. `stage` runs on the coordinator's worker thread, commits run on `loop`."""

    def __init__(
        self,
        version: int,
        deadline: Deadline,
        loop: asyncio.AbstractEventLoop,
        session: Session,
        queue: MessageQueue,
        roster: Roster,
        config: SyncConfig,
        hooks: RunHooks,
    ) -> None:
        self.version = version
        self.started = time.perf_counter()
        self.failures: list[FailedAttempt] = []
        self.excluded: dict[str, WeightlaneError] = {}
        """The replicas that are excluded from the version, with the reasons."""
        self.commits = Commits(version, deadline, loop, roster, queue, hooks)
        self._deadline = deadline
        self._loop = loop
        self._session = session
        self._queue = queue
        self._roster = roster
        self._retries = config.retries

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
                    self.version, targets, self.needed, self._deadline, self.commits.begin_in_place
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
            self._exclude(excluded, failed.error)
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
        self._abort(self.commits.running, error)
        ending = asyncio.run_coroutine_threadsafe(self.commits.finish(self.patience_s), self._loop)
        ending.result(self._deadline.remaining_s + INTERRUPTED_S)

    def _exclude(self, names: Collection[str], error: WeightlaneError) -> None:
        """Exclude the replicas `names` from this version, and abort it there."""
        self.excluded |= dict.fromkeys(names, error)
        self._abort([entry for name, entry in self._roster.entries.items() if name in names], error)

    def _abort(self, entries: Collection[RosterEntry], error: WeightlaneError) -> None:
        message = Abort(session=self._session.name, version=self.version, error=error.to_wire(), disconnect=True)
        self._queue.post_all([name for entry in entries for name in entry.subscribers], message)

    def _all_others_have_it(self, culprits: Collection[str]) -> bool:
        """Whether the version needs no other attempt: a quorum, and every reachable replica but the culprits, has it."""
        without = {*self.excluded, *culprits}
        return (
            bool(self.commits.reports)
            and sum(entry.version == self.version for entry in self._roster.entries.values()) >= self._roster.needed
            and all(entry.version == self.version or entry.name in without for entry in self._roster.reachable())
        )
