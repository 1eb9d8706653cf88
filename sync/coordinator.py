"""`Coordinator`: takes one version after another from offered to committed, or aborts it everywhere."""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from weightlane.ckpt_engines import (
    ClosedError,
    CommitError,
    Deadline,
    DeadlineExceededError,
    ProtocolError,
    SyncAbortedError,
    WeightlaneError,
    as_weightlane_error,
    error_from_wire,
)

from .config import SyncConfig
from .messages import (
    Abort,
    Accepted,
    Committed,
    Connect,
    Connected,
    Failed,
    Go,
    Hello,
    Message,
    Offer,
    Open,
    Reset,
    Sent,
    Staged,
    Stop,
)
from .rendezvous import COORDINATOR, Rendezvous
from .report import CommitOutcome, ReplicaReport, SyncReport

_log = logging.getLogger(__name__)

# Whoever is closest to the cause of a stall gives up first, so that the reason everybody gets names the right peer.
_PUBLISHER_SHARE = 0.9
_SUBSCRIBER_SHARE = 0.95

_Reply = Hello | Connected | Offer | Accepted | Sent | Staged
M = TypeVar("M", Hello, Connected, Offer, Accepted, Sent, Staged)


class Replica(Protocol):
    """A rollout replica as the coordinator sees it. Supplied by the rollout side."""

    @property
    def name(self) -> str:
        """The replica's name, e.g. ``"rollout-0"``."""

    def subscriber_names(self) -> Sequence[str]:
        """Names of the subscribers of its ranks."""

    async def commit(self, version: int) -> CommitOutcome:
        """Put the staged `version` into service on every rank at the same step. `CommitError` if that fails."""


class Coordinator:
    """Runs the life of every version. One per run, in the process that hosts the rendezvous.

    Args:
        rendezvous: The hosted store.
        publishers: Names of the trainer ranks' publishers, in rank order; the first one sends.
        replicas: The rollout replicas.
        config: Deadlines.
    """

    def __init__(
        self, rendezvous: Rendezvous, publishers: Sequence[str], replicas: Sequence[Replica], config: SyncConfig
    ) -> None:
        self._rendezvous = rendezvous
        self._inbox = rendezvous.inbox(COORDINATOR)
        self._publishers = list(publishers)
        self._replicas = list(replicas)
        self._subscribers = [name for replica in replicas for name in replica.subscriber_names()]
        self._config = config
        self._session = ""
        self._ready = False
        self._committed = -1
        self._newest = -1
        """The newest version of this session: engines tell buckets apart by version, so none may come twice."""
        self._offers: dict[int, Offer] = {}
        """Offers of this session that came before `sync` asked for them: publishing does not wait for anybody."""
        self._closed = False
        self._turn = threading.Lock()

    async def connect(self) -> None:
        """Wait for every participant and connect their transports.

        Raises `DeadlineExceededError` naming who is missing, or the error of the participant that failed.
        """
        deadline = Deadline.after(self._config.connect_timeout_s)
        try:
            await asyncio.to_thread(self._connect, deadline)
        except WeightlaneError as error:
            self._abort(-1, error)
            raise

    async def sync(self, version: int) -> SyncReport:
        """Carry `version`, which every publisher has published or is about to, into service on every replica.

        Raises `SyncAbortedError` when it was given up before any replica took it; the old version keeps serving then, and
        every participant gets the same error. Raises `CommitError` when a replica failed while taking it.
        """
        started = time.perf_counter()
        deadline = Deadline.after(self._config.deadline_s)
        try:
            sent, staged = await asyncio.to_thread(self._stage, version, deadline)
        except WeightlaneError as error:
            self._abort(version, error)
            raise SyncAbortedError.because(version, error) from error
        replicas = await self._commit(version, staged, deadline)
        self._committed = version
        self._post_all(Committed(session=self._session, version=version))
        return SyncReport(
            version=version,
            latency_s=time.perf_counter() - started,
            sent_bytes=sum(message.nbytes for message in sent),
            replicas=replicas,
        )

    def participant_lost(self, error: WeightlaneError) -> None:
        """Whoever watches the processes says that one is gone: a sync under way is aborted now, not at its deadline."""
        failed = Failed(name=COORDINATOR, session=self._session, version=-1, error=error.to_wire())
        self._rendezvous.post(COORDINATOR, failed)

    def close(self) -> None:
        """Stop every participant's control thread and end a sync that is under way. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for name in (*self._publishers, *self._subscribers, COORDINATOR):
            try:
                self._rendezvous.post(name, Stop())
            except WeightlaneError:
                _log.debug("the store was gone before close")
                return

    # -- blocking parts, one at a time, on a worker thread --------------------------------------------------------------

    def _connect(self, deadline: Deadline) -> None:
        with self._turn:
            self._ready = False
            self._offers.clear()
            self._newest = self._committed - 1  # a committed version may be sent again, an older one may not
            self._session = f"s-{secrets.token_hex(6)}"
            everyone = [*self._publishers, *self._subscribers]
            self._post_all(Reset(session=self._session))
            hellos = self._collect(Hello, everyone, -1, deadline, "to join")
            addresses = {hello.name: hello.address for hello in hellos}
            self._post_all(
                Connect(
                    session=self._session,
                    publishers=self._publishers,
                    senders={self._publishers[0]: addresses[self._publishers[0]]},
                    receivers={name: addresses[name] for name in self._subscribers},
                    deadline_s=deadline.remaining_s,
                )
            )
            self._collect(Connected, everyone, -1, deadline, "to connect")
            self._ready = True

    def _stage(self, version: int, deadline: Deadline) -> tuple[list[Sent], list[Staged]]:
        if not self._ready:
            self._connect(deadline)
        with self._turn:
            if version <= self._newest:
                raise ProtocolError(
                    f"version {version} was to follow version {self._newest}.",
                    part="coordinator",
                    hint="Versions grow with every publication.",
                )
            self._newest = version
            if version not in self._offers:
                self._collect(Offer, self._publishers[:1], version, deadline, f"to offer version {version}")
            offer = self._offers.pop(version)
            for name in self._subscribers:
                seconds = deadline.remaining_s * _SUBSCRIBER_SHARE
                message = Open(session=self._session, version=version, manifest=offer.manifest, deadline_s=seconds)
                self._rendezvous.post(name, message)
            self._collect(Accepted, self._subscribers, version, deadline, f"to accept version {version}")
            for name in self._publishers:
                seconds = deadline.remaining_s * _PUBLISHER_SHARE
                self._rendezvous.post(name, Go(session=self._session, version=version, deadline_s=seconds))
            awaited: set[tuple[type[_Reply], str]] = {(Sent, name) for name in self._publishers}
            awaited |= {(Staged, name) for name in self._subscribers}
            replies = self._gather(awaited, version, deadline, f"to finish version {version}")
            return (
                [message for message in replies if isinstance(message, Sent)],
                [message for message in replies if isinstance(message, Staged)],
            )

    async def _commit(self, version: int, staged: list[Staged], deadline: Deadline) -> dict[str, ReplicaReport]:
        outcomes = await asyncio.gather(
            *(self._commit_one(replica, version, deadline) for replica in self._replicas), return_exceptions=True
        )
        reports: dict[str, ReplicaReport] = {}
        failures: dict[str, WeightlaneError] = {}
        for replica, outcome in zip(self._replicas, outcomes, strict=True):
            mine = [message for message in staged if message.name in replica.subscriber_names()]
            failed = isinstance(outcome, BaseException)
            if isinstance(outcome, BaseException):
                failures[replica.name] = as_weightlane_error(outcome, replica.name)
            reports[replica.name] = ReplicaReport(
                outcome="failed" if failed else "committed",
                blocked_s=0.0 if isinstance(outcome, BaseException) else outcome.blocked_s,
                staged_s=max((message.seconds for message in mine), default=0.0),
                nbytes=sum(message.nbytes for message in mine),
            )
        if failures:
            named = "; ".join(f"{name}: {error}" for name, error in failures.items())
            error = CommitError(
                f"version {version} was staged everywhere but not taken by every replica: {named}.",
                part="coordinator",
                peer=", ".join(failures),
                hint="A replica that failed here must not serve until a complete version commits.",
            )
            self._abort(version, error)
            raise error
        return reports

    @staticmethod
    async def _commit_one(replica: Replica, version: int, deadline: Deadline) -> CommitOutcome:
        try:
            async with asyncio.timeout(deadline.remaining_s):
                return await replica.commit(version)
        except TimeoutError as error:
            if isinstance(error, WeightlaneError):
                raise
            raise deadline.error(f"version {version} to be committed", part="coordinator", peer=replica.name) from None

    # -- messages -------------------------------------------------------------------------------------------------------

    def _collect(self, kind: type[M], names: Iterable[str], version: int, deadline: Deadline, what: str) -> list[M]:
        replies = self._gather({(kind, name) for name in names}, version, deadline, what)
        return [message for message in replies if isinstance(message, kind)]

    def _gather(
        self, awaited: set[tuple[type[_Reply], str]], version: int, deadline: Deadline, what: str
    ) -> list[_Reply]:
        """One message of each awaited kind from each awaited name; `version` is -1 while connecting.

        Raises the error of whoever reports a failure, or `DeadlineExceededError` naming those who did not answer.
        """
        missing = set(awaited)
        replies: list[_Reply] = []
        while missing:
            names = ", ".join(sorted({name for _, name in missing}))
            try:
                message = self._inbox.get(deadline, waiting_for=f"{names} {what}")
            except DeadlineExceededError as error:
                error.part, error.peer = "coordinator", names
                raise
            if isinstance(message, Stop):
                raise ClosedError("the coordinator was closed.", part="coordinator")
            if getattr(message, "session", None) != self._session:
                continue
            if isinstance(message, Failed) and message.version in (-1, version):
                raise error_from_wire(message.error)
            if isinstance(message, Offer):
                self._offers[message.version] = message
            if not isinstance(message, _Reply):
                continue
            key = (type(message), message.name)
            if key in missing and getattr(message, "version", -1) == version:
                missing.discard(key)
                replies.append(message)
        return replies

    def _post_all(self, message: Message) -> None:
        for name in (*self._publishers, *self._subscribers):
            self._rendezvous.post(name, message)

    def _abort(self, version: int, error: WeightlaneError) -> None:
        """Everybody drops `version` and the connection; the next sync connects anew."""
        self._ready = False
        _log.warning("version %d aborted: %s", version, error)
        try:
            self._post_all(Abort(session=self._session, version=version, error=error.to_wire()))
        except WeightlaneError:
            _log.warning("the store is gone; participants learn of the abort by their own deadlines")
