"""What a subscriber receives through in one session: one stream of everything, or a lane from each rank that has something."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from weightlane.ckpt_engines import Deadline, ReceiverLink
from weightlane.ckpt_engines.links.bounded_calls import GRACE_S
from weightlane.ckpt_engines.runtime.daemon_threads import DaemonThreads

from ..control.engine_links import EngineLinks
from ..plan.session_plan import PlannedLink, SessionPlan
from ..version.bucket_checksums import StoredChecksums
from ..version.manifest import Manifest
from .relay import RelayLink, onward_links

_PATIENCE = 0.2
"""By how much of the longest time for a bucket a receiver waits longer than whoever is one hop nearer to the trainer."""


@dataclass(frozen=True, slots=True)
class BucketSender:
    """One sender of this rank's."""

    link: ReceiverLink
    sender: str
    hops: int = 1
    """How many the longest way from the trainer has, of those that end here."""

    def patience_s(self, stall_s: float) -> float:
        """How long one bucket may take if its sender gives up after `stall_s`, seconds: the sender shall speak first."""
        return stall_s * (1 + _PATIENCE * self.hops)


@dataclass(frozen=True, slots=True)
class ExpectedBucket:
    """A bucket that is to come."""

    source: BucketSender
    index: int
    """In the rank's own stream."""
    sent_as: int
    """In the sender's."""


@dataclass(frozen=True, slots=True)
class ReceiveLink:
    """A link that ends here: its buckets come one after the other, while those of others come beside them.

    Attributes:
        sources: Its senders from whom something comes, by name.
        link: The plan's; None for one stream from one sender.
        lanes: Those that come here from each of them.
    """

    sources: Mapping[str, BucketSender]
    link: PlannedLink | None = None
    lanes: Mapping[str, frozenset[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class ReceiveSession:
    """Of one rank in one session.

    Attributes:
        session: Its name.
        inlets: Through which something comes.
        stored_checksums: Where the checksums of buckets are found that lie in a store; None where they come ahead of each.
        planned: The session's plan; None for one stream from one sender.
        lanes: The plan's lanes that come here, in order: the sections of this rank's own stream.
        onward: The links through which they are handed on.
    """

    session: str
    inlets: tuple[ReceiveLink, ...]
    stored_checksums: StoredChecksums | None = None
    planned: SessionPlan | None = None
    lanes: tuple[int, ...] = ()
    onward: tuple[RelayLink, ...] = ()

    @classmethod
    def by_plan(cls, session: str, name: str, planned: SessionPlan, halves: EngineLinks) -> ReceiveSession:
        """Of the rank `name`, whose `halves` are connected."""
        inlets = []
        for link in planned.received_by(name):
            lanes = {sender: frozenset(planned.lanes_to(name, link, sender)) for sender in link.senders}
            sources = {
                sender: BucketSender(
                    halves.receivers[link.number], sender, max(planned.routes[lane].hops_to(name) for lane in theirs)
                )
                for sender, theirs in lanes.items()
                if theirs
            }
            inlets.append(ReceiveLink(sources, link, lanes))
        everything = sorted({lane for inlet in inlets for theirs in inlet.lanes.values() for lane in theirs})
        onward = onward_links(name, planned, halves.senders)
        return cls(session, tuple(inlets), None, planned, tuple(everything), onward)

    @property
    def sources(self) -> list[BucketSender]:
        """Everybody from whom something comes."""
        return [source for inlet in self.inlets for source in inlet.sources.values()]

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

    def arrivals(self, sent: Manifest, own: Manifest, inlet: ReceiveLink) -> Iterator[ExpectedBucket]:
        """The buckets of a version that come through `inlet`, in the order in which they are sent."""
        if inlet.link is None:
            (source,) = inlet.sources.values()
            yield from (ExpectedBucket(source, index, index) for index in range(own.bucket_count))
            return
        # The lanes that come here are the sections of the own stream, bucket for bucket.
        mine = {
            theirs: ours
            for section, lane in enumerate(self.lanes)
            for theirs, ours in zip(sent.buckets_of(lane), own.buckets_of(section), strict=True)
        }
        for turn in inlet.link.turns(sent):
            if turn.lane in inlet.lanes[turn.sender]:
                yield ExpectedBucket(inlet.sources[turn.sender], mine[turn.sent_as], turn.sent_as)


@dataclass(frozen=True, slots=True)
class TransferTask:
    """What goes on between this rank and `peers` while a version comes."""

    peers: Sequence[str]
    run: Callable[[], None]


class TransferTasks:
    """Receives from several sources, and hands on to others, at the same time: each on a thread of its own.

    Args:
        name: The participant.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: list[Future[None]] = []
        """What has not ended though another one failed."""

    def run(self, ways: Sequence[TransferTask], deadline: Deadline) -> None:
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
