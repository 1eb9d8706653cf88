"""What a subscriber receives through in one session: one stream of everything, or a lane from each rank that has something."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from weightlane.ckpt_engines import Deadline, WeightReceiver

from .daemon_threads import DaemonThreads
from .engine_calls import GRACE_S
from .link_halves import LinkHalves
from .manifest import Manifest
from .relaying import Onward, onward_links
from .seal import SealMail
from .session_plan import Link, SessionPlan

_PATIENCE = 0.2
"""By how much of the longest time for a bucket a receiver waits longer than whoever is one hop nearer to the trainer."""


@dataclass(frozen=True, slots=True)
class Source:
    """One sender of this rank's, and which sections of its own stream come from there."""

    receiver: WeightReceiver
    sender: str
    sections: tuple[int, ...]
    hops: int = 1
    """How many the longest way from the trainer has, of those that end here."""

    def patience_s(self, stall_s: float) -> float:
        """How long one bucket may take if its sender gives up after `stall_s`, seconds: the sender shall speak first."""
        return stall_s * (1 + _PATIENCE * self.hops)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A bucket that is to come."""

    index: int
    """In the rank's own stream."""
    sent_as: int
    """In the sender's."""


@dataclass(frozen=True)
class Receiving:
    """Of one rank in one session.

    Attributes:
        session: Its name.
        seals: Where the buckets' seals are found.
        sources: From whom something comes.
        planned: The session's plan; None for one stream from one sender.
        lanes: The plan's lanes that come here, in order: the sections of this rank's own stream.
        onward: The links through which they are handed on.
    """

    session: str
    seals: SealMail
    sources: tuple[Source, ...]
    planned: SessionPlan | None = None
    lanes: tuple[int, ...] = ()
    onward: tuple[Onward, ...] = ()

    @classmethod
    def by_plan(cls, session: str, seals: SealMail, name: str, planned: SessionPlan, halves: LinkHalves) -> Receiving:
        """Of the rank `name`, whose `halves` are connected."""
        links = planned.received_by(name)
        lanes = tuple(sorted(lane for link in links for lane in planned.lanes_to(name, link)))

        def source(link: Link) -> Source:
            theirs = planned.lanes_to(name, link)
            hops = max(planned.routes[lane].hops_to(name) for lane in theirs)
            return Source(halves.receivers[link.number], link.sender, tuple(map(lanes.index, theirs)), hops)

        onward = onward_links(name, planned, halves.senders)
        return cls(session, seals, tuple(map(source, links)), planned, lanes, onward)

    @cached_property
    def _own(self) -> Manifest | None:
        return None if self.planned is None else self.planned.layout.only(self.lanes)

    def manifest(self, plain: Any, newest: Manifest | None) -> tuple[Manifest, Manifest]:
        """The manifest of an offered version: as it was sent, and of what comes here. `newest` is that of the one before."""
        if self.planned is None or self._own is None:
            sent = Manifest.from_plain(plain, newest)
            return sent, sent
        sent = Manifest.from_plain(plain, self.planned.layout)
        own = sent.only(self.lanes)
        return sent, replace(own, specs=self._own.specs, slicing=self._own.slicing)

    def arrivals(self, sent: Manifest, own: Manifest, source: Source) -> Iterator[Arrival]:
        """The buckets of a version that come from `source`, in the order in which they are sent."""
        if self.planned is None:
            yield from (Arrival(index, index) for index in range(own.bucket_count))
            return
        for section in sorted(source.sections):
            theirs = sent.buckets_of(self.lanes[section])
            yield from map(Arrival, own.buckets_of(section), theirs)


@dataclass(frozen=True, slots=True)
class Way:
    """What goes on between this rank and `peers` while a version comes."""

    peers: Sequence[str]
    run: Callable[[], None]


class Ways:
    """Receives from several sources, and hands on to others, at the same time: each on a thread of its own.

    Args:
        name: The participant.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: list[Future[None]] = []
        """What has not ended though another one failed."""

    def run(self, ways: Sequence[Way], deadline: Deadline) -> None:
        """Return when all of `ways` have ended; raise what one first raised, at once.

        What else is running then ends when the session is closed: see `settle`. `DeadlineExceededError`, naming the peers, if a
        call has outlived the deadline that it was given.
        """
        if not ways:
            return
        threads = DaemonThreads(len(ways), f"weightlane-receive-{self._name}")
        running = [threads.submit(way.run) for way in ways]
        threads.shutdown(wait=False)
        done, late = wait(running, deadline.remaining_s + GRACE_S, FIRST_EXCEPTION)
        self._running = list(late)
        for each in done:
            each.result()
        if late:
            peers = [peer for way, future in zip(ways, running, strict=True) if future in late for peer in way.peers]
            raise deadline.error("buckets", part=self._name, peer=", ".join(peers))

    def settle(self, deadline: Deadline) -> None:
        """Wait until nobody of an earlier `run` reads or writes any more. Raises `DeadlineExceededError`."""
        if wait(self._running, deadline.remaining_s).not_done:
            raise deadline.error("an earlier version's buckets to be given up", part=self._name)
        self._running = []
