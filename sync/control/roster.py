"""Who takes part in a run, what state each replica is in, and how many of them a version needs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from weightlane.ckpt_engines import ConfigError, PeerLostError, WeightlaneError

from ..report import CommitOutcome


class Replica(Protocol):
    """A rollout replica as the coordinator sees it. Supplied by the rollout side."""

    @property
    def name(self) -> str:
        """The replica's name, e.g. ``"rollout-0"``."""

    def subscriber_names(self) -> Sequence[str]:
        """Names of the subscribers of its ranks."""

    async def commit(self, version: int) -> CommitOutcome:
        """Put the staged `version` into service on every rank at the same step.

        Raises `UntouchedError` when the version it had is in place everywhere and serves on, `WorkerDiedError` when it is gone,
        and anything else when it cannot tell what its ranks hold: it is quarantined then.
        """

    async def rollback(self, version: int) -> None:
        """Undo the commit of `version`: serve what was served before it. Raises when that is impossible."""

    async def quarantine(self, error: WeightlaneError) -> None:
        """Serve nobody until the next commit; requests are refused with `error`."""


class ReplicaState(StrEnum):
    """Whether a replica may get requests."""

    JOINING = "joining"
    """It has not taken a version of this run yet."""
    SERVING = "serving"
    """Every one of its ranks holds a version that was published, maybe not the newest."""
    QUARANTINED = "quarantined"
    """It cannot prove what it holds; a complete version brings it back."""
    LOST = "lost"
    """It died or does not answer; it comes back by joining again or by answering."""


@dataclass(slots=True)
class RosterEntry:
    """A replica and what is known of it."""

    replica: Replica
    names: tuple[str, ...]
    """Its subscribers."""
    state: ReplicaState = ReplicaState.JOINING
    version: int = -1
    """The version it serves; -1 before the first and while that is unknown."""
    error: WeightlaneError | None = None
    """Why it is quarantined or lost."""

    @property
    def name(self) -> str:
        """The replica's name."""
        return self.replica.name


class Roster:
    """The publishers and replicas of a run.

    Args:
        publishers: Names of the trainer ranks' publishers, in rank order; the first one sends.
        replicas: The rollout replicas.
        quorum: Share of the replicas that must take a version.
    """

    def __init__(self, publishers: Sequence[str], replicas: Iterable[Replica], quorum: float) -> None:
        self.publishers = tuple(publishers)
        self.members: dict[str, RosterEntry] = {}
        self.inboxes: dict[str, str] = {}
        """Where each participant that has joined reads its messages."""
        self._quorum = quorum
        self._owners: dict[str, RosterEntry] = {}
        """Each replica by the names of its subscribers."""
        self._names: dict[str, tuple[str, ...]] = {}
        """Replicas with their subscribers, as they will be when all changes are made."""
        self._changes: deque[Callable[[], None]] = deque()
        for replica in replicas:
            self.add(replica)
        self.settle()

    def add(self, replica: Replica) -> None:
        """A further replica, from the next `settle` on; `ConfigError` if its name or one of its subscribers' is taken."""
        names = tuple(replica.subscriber_names())
        taken = {*self.publishers, *(name for others in self._names.values() for name in others)}
        if replica.name in self._names or taken.intersection(names):
            raise ConfigError(f"{replica.name} takes part already.", part="coordinator", peer=replica.name)
        self._names[replica.name] = names

        def enter() -> None:
            member = self.members[replica.name] = RosterEntry(replica, names)
            self._owners |= dict.fromkeys(names, member)

        self._changes.append(enter)

    def remove(self, name: str) -> None:
        """A replica leaves for good, and no longer counts from the next `settle` on; `ConfigError` if there is none."""
        if self._names.pop(name, None) is None:
            raise ConfigError(f"no replica is called {name!r}.", part="coordinator")

        def leave() -> None:
            for subscriber in self.members.pop(name).names:
                self.inboxes.pop(subscriber, None)
                del self._owners[subscriber]

        self._changes.append(leave)

    def settle(self) -> None:
        """Make the changes that were asked for: while a version is under way it stays the same."""
        while self._changes:
            self._changes.popleft()()

    @property
    def needed(self) -> int:
        """How many replicas a version needs."""
        # The product is exact enough: 0.3 * 10 must not become 4.
        return max(1, math.ceil(self._quorum * len(self.members) - 1e-9)) if self.members else 0

    def everyone(self) -> list[str]:
        """Names of all publishers and subscribers."""
        return [*self.publishers, *(name for member in self.members.values() for name in member.names)]

    def reachable(self) -> list[RosterEntry]:
        """Members whose subscribers have all joined and that are not lost."""
        return [
            member
            for member in self.members.values()
            if member.state is not ReplicaState.LOST and all(name in self.inboxes for name in member.names)
        ]

    def owner(self, subscriber: str) -> RosterEntry | None:
        """The replica that a subscriber belongs to."""
        return self._owners.get(subscriber)

    def joined(self, name: str, inbox: str) -> bool:
        """A participant is there. Returns whether that is news: it is new, or took the place of an older one."""
        news = self.inboxes.get(name) != inbox
        self.inboxes[name] = inbox
        if news and (member := self.owner(name)):
            # A new subscriber says nothing of the weights its process holds.
            member.state, member.version, member.error = ReplicaState.JOINING, -1, None
        return news

    def left(self, name: str, inbox: str) -> bool:
        """A participant has closed. Returns whether it was the present one of that name."""
        if self.inboxes.get(name) != inbox:
            return False
        del self.inboxes[name]
        if member := self.owner(name):
            self.lost(member, PeerLostError("the subscriber was closed.", part="coordinator", peer=name))
        return True

    def lost(self, member: RosterEntry, error: WeightlaneError) -> None:
        """A replica is gone, or does not answer."""
        member.state, member.version, member.error = ReplicaState.LOST, -1, error

    def answered(self, name: str) -> None:
        """A participant has said something: one that was thought lost lives, and needs a complete version."""
        member = self.owner(name)
        if member is not None and member.state is ReplicaState.LOST and name in self.inboxes:
            member.state = ReplicaState.QUARANTINED
