"""`ReceiveSession`: the links through which one rollout rank receives in a session, and the buckets expected on each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from weightlane.ckpt_engines import ReceiverLink

from ..control.engine_links import EngineLinks
from ..plan.links import PlannedLink
from ..plan.session_plan import SessionPlan
from ..send.pipeline import Destination, destinations_of
from ..version.bucket_checksums import StoredChecksums
from ..version.manifest import Manifest

_EXTRA_PER_HOP = 0.2
"""Extra waiting time for each hop to the trainer, in shares of `stall_s`: a stalled sender then fails before its receiver."""


@dataclass(frozen=True, slots=True)
class BucketSender:
    """The participant `name` at the other end of a receiver link."""

    link: ReceiverLink
    name: str
    hops: int = 1
    """Hops on the longest route from a trainer rank that ends with this sender and this rank."""

    def stall_s(self, stall_s: float) -> float:
        """Longest time to wait for one bucket, in seconds, if the trainer's limit is `stall_s`."""
        return stall_s * (1 + _EXTRA_PER_HOP * self.hops)


@dataclass(frozen=True, slots=True)
class ExpectedBucket:
    """A bucket that a receiver waits for."""

    sender: BucketSender
    index: int
    """Index in this rank's own stream."""
    sent_as: int
    """Index in the version as sent."""
    offset: int
    """First byte in this rank's own stream, or in a delta's segments."""
    nbytes: int


@dataclass(frozen=True, slots=True)
class ReceiveLink:
    """One receiver link, with the senders of buckets for this rank by name. Its buckets arrive in order."""

    senders: Mapping[str, BucketSender]
    planned: PlannedLink | None = None
    """The link in the session's plan; None for one stream from one sender."""
    lanes: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Lanes for this rank, by sender."""


@dataclass(frozen=True)
class ReceiveSession:
    """The receiving end of one rank in one session.

    Attributes:
        name: The session's name.
        links: Links with buckets for this rank; they run at the same time.
        stored_checksums: Checksums of versions in a store; None where each checksum arrives with its bucket.
        planned: The session's plan; None for one stream from one sender.
        lanes: Lanes for this rank, in the plan's order. They are the sections of the rank's own stream.
        relayed: The lanes that this rank relays on each of its sender links, with their destinations.
    """

    name: str
    links: tuple[ReceiveLink, ...]
    stored_checksums: StoredChecksums | None = None
    planned: SessionPlan | None = None
    lanes: tuple[int, ...] = ()
    relayed: tuple[Mapping[int, Destination], ...] = ()

    @classmethod
    def by_plan(cls, session: str, rank: str, planned: SessionPlan, engine_links: EngineLinks) -> ReceiveSession:
        """The receiving end of participant `rank`, whose `engine_links` are connected."""
        links = []
        for link in planned.received_by(rank):
            lanes = {sender: frozenset(planned.lanes_to(rank, link, sender)) for sender in link.senders}
            senders = {
                name: BucketSender(
                    engine_links.receivers[link.number], name, max(planned.routes[lane].hops_to(rank) for lane in sent)
                )
                for name, sent in lanes.items()
                if sent
            }
            links.append(ReceiveLink(senders, link, lanes))
        own = sorted({lane for link in links for sent in link.lanes.values() for lane in sent})
        relayed = destinations_of(rank, planned, engine_links.senders)
        return cls(session, tuple(links), None, planned, tuple(own), tuple(relayed))

    @property
    def senders(self) -> list[BucketSender]:
        """Every sender on every link."""
        return [sender for link in self.links for sender in link.senders.values()]

    @cached_property
    def _own_layout(self) -> Manifest | None:
        return None if self.planned is None else self.planned.layout.only(self.lanes)

    def manifest(self, plain: Any, newest: Manifest | None) -> tuple[Manifest, Manifest]:
        """Parse an offered manifest; returns the manifest as sent, and the manifest of this rank's own stream.

        `newest` is the manifest of the version offered before. Raises `ProtocolError`.
        """
        if self.planned is None or self._own_layout is None:
            sent = Manifest.from_plain(plain, newest)
            return sent, sent
        sent = Manifest.from_plain(plain, self.planned.layout)
        # Tensors and slicing are shared between versions, so that what was computed from them holds for each.
        return sent, replace(sent.only(self.lanes), specs=self._own_layout.specs, slicing=self._own_layout.slicing)

    def expected_buckets(self, sent: Manifest, own: Manifest, link: ReceiveLink) -> Iterator[ExpectedBucket]:
        """The buckets of a version that arrive through `link`, in the order they are sent."""
        if link.planned is None:
            (sender,) = link.senders.values()
            for index in range(own.bucket_count):
                yield _expected(sender, own, index, index)
            return
        # The lanes for this rank are the sections of its own stream, bucket for bucket.
        own_index = {
            sent_as: index
            for section, lane in enumerate(self.lanes)
            for sent_as, index in zip(sent.buckets_of(lane), own.buckets_of(section), strict=True)
        }
        for turn in link.planned.turns(sent):
            if turn.lane in link.lanes[turn.sender]:
                yield _expected(link.senders[turn.sender], own, own_index[turn.sent_as], turn.sent_as)


def _expected(sender: BucketSender, own: Manifest, index: int, sent_as: int) -> ExpectedBucket:
    start, stop = own.window(index)
    return ExpectedBucket(sender, index, sent_as, start, stop - start)
