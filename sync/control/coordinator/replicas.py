"""The replicas of a run as the coordinator knows them: a `Roster` of their states, and the `SyncReport` of a version on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Any, Protocol

from weightlane.ckpt_engines import ConfigError, PeerLostError, WeightlaneError

from ...codecs.quantised import QuantisationReport
from ..messages import COORDINATOR


@dataclass(frozen=True, slots=True)
class CommitReport:
    """The cost of one commit for a replica, as far as the replica knows it."""

    version: int
    blocked_s: float
    """Seconds in which the engine began no decode step, including the rest of the step in progress."""
    load_s: float = 0.0
    """Seconds of `blocked_s` in which the weights were replaced on all ranks."""
    waited_s: float = 0.0
    """Seconds before `blocked_s`: until the call reached the engine and the engine began to handle it."""
    in_flight: int = 0
    """Requests that were generating when the commit began."""
    recomputed_tokens: int = 0
    """Tokens of requests in flight, of prompts and completions, that prefill again because their caches were dropped. A prefix
    that several requests share counts for each of them, although vLLM computes it once."""


class Replica(Protocol):
    """A rollout replica as the coordinator sees it. The rollout side supplies it."""

    @property
    def name(self) -> str:
        """The replica's name, e.g. ``"rollout-0"``."""

    def subscriber_names(self) -> Sequence[str]:
        """Names of the subscribers of the replica's ranks."""

    async def commit(self, version: int) -> CommitReport:
        """Put the staged `version` into service on every rank at the same step.

        Raises `UntouchedError` if every rank still serves the version it had, and `WorkerDiedError` if the replica is gone.
        After any other error it is not known which weights the ranks hold, and the replica is quarantined.
        """

    async def rollback(self, version: int) -> None:
        """Undo the commit of `version`: serve the version before it. Raises an error if that is impossible."""

    async def quarantine(self, error: WeightlaneError) -> None:
        """Refuse all requests with `error` until the next commit."""


class ReplicaState(StrEnum):
    """Whether a replica may get requests."""

    JOINING = "joining"
    """The replica has not committed a version of this run yet, or has given up its weights since."""
    SERVING = "serving"
    """Every rank of the replica holds a published version, maybe not the newest."""
    QUARANTINED = "quarantined"
    """The replica cannot prove which weights it holds; it serves again after it has committed a complete version."""
    LOST = "lost"
    """The replica died or does not answer. If it joins again it is `JOINING`, if it answers again `QUARANTINED`."""


@dataclass(slots=True, eq=False)
class RosterEntry:
    """A replica with its state and the version it serves."""

    name: str
    replica: Replica
    subscribers: tuple[str, ...]
    """Names of the subscribers of its ranks."""
    state: ReplicaState = ReplicaState.JOINING
    version: int = -1
    """The version that the replica serves; -1 before the first one and while that is unknown."""
    error: WeightlaneError | None = None
    """Why the replica is quarantined or lost, or why its model does not fit."""
    fits: bool = True
    """False if the trainer's tensors do not fit the replica's model: it would refuse every version."""


class Roster:
    """The publishers and replicas of a run.

    Args:
        publishers: Names of the trainer ranks' publishers, in rank order; the first one makes the offers.
        replicas: The rollout replicas.
        quorum: Share of the replicas that must commit a version.
    """

    def __init__(self, publishers: Sequence[str], replicas: Iterable[Replica], quorum: float) -> None:
        self.publishers = tuple(publishers)
        self.entries: dict[str, RosterEntry] = {}
        """Replicas by name."""
        self.inboxes: dict[str, str] = {}
        """The inbox of each participant that has joined, by its name, also if its replica was removed: it may be added again."""
        self._quorum = quorum
        self._by_subscriber: dict[str, RosterEntry] = {}
        self._planned: dict[str, RosterEntry] = {}
        """Replicas by name, as of the next `apply_changes`."""
        for replica in replicas:
            self.add(replica)
        self.apply_changes()

    def add(self, replica: Replica) -> None:
        """Add a replica at the next `apply_changes`. Raises `ConfigError` if its name or a subscriber's name is taken."""
        subscribers = tuple(replica.subscriber_names())
        taken = {*self.publishers, *(name for entry in self._planned.values() for name in entry.subscribers)}
        if replica.name in self._planned or taken.intersection(subscribers):
            raise ConfigError(f"{replica.name} takes part already.", part=COORDINATOR, peer=replica.name)
        self._planned[replica.name] = RosterEntry(replica.name, replica, subscribers)

    def remove(self, name: str) -> None:
        """Remove a replica at the next `apply_changes`. Raises `ConfigError` if there is no replica of that name."""
        if self._planned.pop(name, None) is None:
            raise ConfigError(f"no replica is called {name!r}.", part=COORDINATOR)

    def apply_changes(self) -> None:
        """Apply the calls of `add` and `remove` since the last time. Must not be called during a sync."""
        self.entries = dict(self._planned)
        self._by_subscriber = {name: entry for entry in self.entries.values() for name in entry.subscribers}

    @property
    def needed(self) -> int:
        """How many replicas must commit a version for a quorum."""
        # The tolerance absorbs rounding errors: 0.3 * 10 must not become 4.
        return max(1, math.ceil(self._quorum * len(self.entries) - 1e-9)) if self.entries else 0

    def participants(self) -> list[str]:
        """Names of all publishers and subscribers."""
        return [*self.publishers, *self._by_subscriber]

    def reachable(self) -> list[RosterEntry]:
        """Replicas that are not lost, whose model fits, and whose subscribers have all joined."""
        return [
            entry
            for entry in self.entries.values()
            if entry.fits
            and entry.state is not ReplicaState.LOST
            and all(name in self.inboxes for name in entry.subscribers)
        ]

    def entry_of(self, subscriber: str) -> RosterEntry | None:
        """The replica that a subscriber belongs to; None for a publisher or an unknown name."""
        return self._by_subscriber.get(subscriber)

    def replicas_of(self, names: Iterable[str]) -> set[str]:
        """Names of the replicas to which participants belong; publishers and unknown names belong to none."""
        return {entry.name for name in names if (entry := self.entry_of(name))}

    def note_joined(self, name: str, inbox: str) -> bool:
        """Note that a participant has joined. Returns whether it is new, or replaces an older one of its name."""
        is_new = self.inboxes.get(name) != inbox
        self.inboxes[name] = inbox
        if is_new and (entry := self.entry_of(name)):
            # It is not known which weights the process of a new subscriber holds.
            entry.state, entry.version, entry.error, entry.fits = ReplicaState.JOINING, -1, None, True
        return is_new

    def note_weights_lost(self, name: str) -> None:
        """Note that a replica holds no version. It stays as it is if it is lost or quarantined."""
        entry = self.entries.get(name)
        if entry is not None and entry.state is ReplicaState.SERVING:
            entry.state, entry.version = ReplicaState.JOINING, -1

    def note_left(self, name: str, inbox: str) -> bool:
        """Note that a participant has closed. Returns whether it was the current one of its name."""
        if self.inboxes.get(name) != inbox:
            return False
        del self.inboxes[name]
        if entry := self.entry_of(name):
            self.mark_lost(entry, PeerLostError("the subscriber was closed.", part=COORDINATOR, peer=name))
        return True

    def mark_lost(self, entry: RosterEntry, error: WeightlaneError) -> None:
        """Mark a replica as lost, because it died or does not answer."""
        entry.state, entry.version, entry.error = ReplicaState.LOST, -1, error

    def note_misfits(self, names: Iterable[str], error: WeightlaneError) -> None:
        """Note that the replicas' model does not fit the trainer's tensors. They get no versions until they join again."""
        for entry in filter(None, map(self.entries.get, names)):
            entry.fits, entry.error = False, error

    def note_answer(self, name: str) -> None:
        """Note that a participant has sent a message. A lost replica that answers is alive, and needs a complete version."""
        entry = self.entry_of(name)
        if entry is not None and entry.state is ReplicaState.LOST and name in self.inboxes:
            entry.state = ReplicaState.QUARANTINED


class Outcome(StrEnum):
    """The outcome of a version on one replica."""

    COMMITTED = "committed"
    """The version serves."""
    BEHIND = "behind"
    """The replica serves the version it had, bit for bit: the new one was not staged, or its commit changed nothing."""
    QUARANTINED = "quarantined"
    """The replica cannot prove which weights it holds, and gets no requests until a complete version commits there."""
    LOST = "lost"
    """The replica died or does not answer."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica's part in a sync."""

    outcome: Outcome
    error: WeightlaneError | None = None
    """Why the replica did not commit the version; None if it did."""
    blocked_s: float = 0.0
    """Seconds the replica generated nothing because of the commit."""
    staged_s: float = 0.0
    """Seconds from the request for the first byte to the verification of the last one, on the replica's slowest rank."""
    nbytes: int = 0
    """Bytes staged, over all ranks of the replica."""
    install_s: float = 0.0
    """Seconds that its commit took, of which it generated nothing for `blocked_s`. A commit in place begins with the transfer."""
    recomputed_tokens: int = 0
    """Tokens that its requests in flight prefill again because the commit dropped their caches."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A failed attempt to send or commit a version, on all replicas or on some."""

    session: str
    """The session of the attempt."""
    error: WeightlaneError
    """The first failure, typed."""
    excluded: tuple[str, ...] = ()
    """Replicas that the next attempt excluded, or that did not commit."""

    def to_plain(self) -> dict[str, Any]:
        """The attempt as JSON-representable data, for observers."""
        return {"session": self.session, "error": self.error.to_wire(), "excluded": list(self.excluded)}


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The report of the sync of a committed version."""

    version: int
    latency_s: float
    """Seconds from the start of the sync until the last replica served the version."""
    sent_bytes: int
    """Payload bytes that the trainer ranks handed to the engine, or to rank 0 if it gathers."""
    replicas: Mapping[str, ReplicaReport] = field(default_factory=dict)
    session: str = ""
    """The session in which the version was sent."""
    codec: str = "dense"
    """The codec with which the version was sent."""
    codec_reason: str = ""
    """Why that codec was chosen."""
    quantisation: QuantisationReport | None = None
    """The error of a sample of the quantised elements against the trainer's values; None if nothing is quantised, or if the
    version was read from a store again."""
    failures: tuple[FailedAttempt, ...] = ()
    """The failed attempts at this version, in order."""
    export_s: float = 0.0
    """Seconds in which the slowest trainer rank copied its shards into its snapshot. The transfer begins meanwhile."""

    @property
    def rollout_blocked_s(self) -> float:
        """The longest time any replica generated nothing."""
        return max((report.blocked_s for report in self.replicas.values()), default=0.0)

    @property
    def transfer_s(self) -> float:
        """Seconds in which the slowest replica received and verified the version."""
        return max((report.staged_s for report in self.replicas.values()), default=0.0)

    @property
    def install_s(self) -> float:
        """Seconds of the longest commit."""
        return max((report.install_s for report in self.replicas.values()), default=0.0)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that requests in flight prefill again, on all replicas."""
        return sum(report.recomputed_tokens for report in self.replicas.values())

    def facts(self) -> dict[str, Any]:
        """The report as JSON-representable data, for observers."""
        quantised = {"quantisation_error": self.quantisation.relative_rms} if self.quantisation else {}
        return {
            "seconds": self.latency_s,
            "latency_s": self.latency_s,
            "export_s": self.export_s,
            "transfer_s": self.transfer_s,
            "install_s": self.install_s,
            "rollout_blocked_s": self.rollout_blocked_s,
            "recomputed_tokens": self.recomputed_tokens,
            "sent_bytes": self.sent_bytes,
            **quantised,
            "failures": [failure.to_plain() for failure in self.failures],
            "replicas": {
                name: {each.name: getattr(part, each.name) for each in fields(part) if each.name != "error"}
                for name, part in self.replicas.items()
            },
        }
