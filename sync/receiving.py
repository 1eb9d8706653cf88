"""What a subscriber receives through in one session: one stream of everything, or a lane from each rank that has something."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from weightlane.ckpt_engines import Deadline, WeightReceiver

from .manifest import Manifest
from .seal import SealMail
from .session_plan import Link, SessionPlan

_GRACE_S = 2.0
"""How much longer than the receiving calls, which know better what has happened, whoever waits for them does."""


@dataclass(frozen=True, slots=True)
class Source:
    """One sender of this rank's, and which sections of its own stream come from there."""

    receiver: WeightReceiver
    sender: str
    sections: tuple[int, ...]


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
    """

    session: str
    seals: SealMail
    sources: tuple[Source, ...]
    planned: SessionPlan | None = None
    lanes: tuple[int, ...] = ()

    @classmethod
    def by_plan(
        cls, session: str, seals: SealMail, name: str, planned: SessionPlan, halves: dict[int, WeightReceiver]
    ) -> Receiving:
        """Of the rank `name`, whose connected `halves` are given by link."""
        links = planned.received_by(name)
        lanes = tuple(sorted(lane for link in links for lane in planned.lanes_to(name, link)))

        def source(link: Link) -> Source:
            sections = tuple(lanes.index(lane) for lane in planned.lanes_to(name, link))
            return Source(halves[link.number], link.sender, sections)

        return cls(session, seals, tuple(map(source, links)), planned, lanes)

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


class SourceThreads:
    """Receives from several sources at the same time, on a thread for each; from one on the caller's own.

    Args:
        name: The participant.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: list[Future[None]] = []
        """What has not ended though another source failed."""

    def run(self, sources: Sequence[Source], receive: Callable[[Source], None], deadline: Deadline) -> None:
        """Return when `receive` has returned for each of `sources`; raise what it first raised, at once.

        What else is running then ends when the session is closed: see `settle`. `DeadlineExceededError`, naming the senders, if a
        call has outlived the deadline that it was given.
        """
        if len(sources) <= 1:
            for source in sources:
                receive(source)
            return
        threads = ThreadPoolExecutor(len(sources), thread_name_prefix=f"weightlane-receive-{self._name}")
        running = [threads.submit(receive, source) for source in sources]
        threads.shutdown(wait=False)
        done, late = wait(running, deadline.remaining_s + _GRACE_S, FIRST_EXCEPTION)
        self._running = list(late)
        for each in done:
            each.result()
        if late:
            peers = [source.sender for source, future in zip(sources, running, strict=True) if future in late]
            raise deadline.error("buckets", part=self._name, peer=", ".join(peers))

    def settle(self, deadline: Deadline) -> None:
        """Wait until nobody of an earlier `run` writes any more. Raises `DeadlineExceededError`."""
        if wait(self._running, deadline.remaining_s).not_done:
            raise deadline.error("an earlier version's buckets to be given up", part=self._name)
        self._running = []
