"""`Roster`: the participants of a run, each `Replica` with its state, and how many replicas a version needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from weightlane.ckpt_engines import ConfigError, PeerLostError, WeightlaneError

from ..messages import COORDINATOR
from .report import CommitReport


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
        """The inbox of each participant that has joined, by its name."""
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
        planned = dict(self._planned)
        for name, entry in self.entries.items():
            if planned.get(name) is not entry:
                for subscriber in entry.subscribers:
                    self.inboxes.pop(subscriber, None)
        self.entries = planned
        self._by_subscriber = {name: entry for entry in planned.values() for name in entry.subscribers}

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
