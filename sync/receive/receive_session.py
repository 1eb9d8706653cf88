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
"""Extra time limit per hop from the trainer, as a share of `stall_s`, so that a stalled sender fails before its receiver."""


@dataclass(frozen=True, slots=True)
class Source:
    """A receiver link, and the participants that send buckets to this rank on it. The buckets arrive in order."""

    link: ReceiverLink
    hops: Mapping[str, int]
    """Number of hops from the trainer to this rank, on the longest route among a sender's lanes, by sender."""
    lanes: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Lanes for this rank, by sender."""
    planned: PlannedLink | None = None
    """The link in the session's plan; None for one stream from one sender."""

    def stall_s(self, sender: str, stall_s: float) -> float:
        """Time limit for one bucket of `sender`, in seconds, if the trainer's own limit is `stall_s`."""
        return stall_s * (1 + _EXTRA_PER_HOP * self.hops[sender])


@dataclass(frozen=True, slots=True)
class ExpectedBucket:
    """A bucket that a receiver waits for."""

    source: Source
    sender: str
    index: int
    """Index in this rank's own stream."""
    sent_as: int
    """Index in the version as sent."""
    turn: int | None
    """Number of its turn on the link; None for one stream from one sender."""
    offset: int
    """First byte in this rank's own stream, or in a delta's segments."""
    nbytes: int


@dataclass(frozen=True)
class ReceiveSession:
    """The receiving end of one rank in one session.

    Attributes:
        name: The session's name.
        sources: Links with buckets for this rank, all received from concurrently.
        stored_checksums: Checksums of versions in a store; None where each checksum arrives with its bucket.
        planned: The session's plan; None for one stream from one sender.
        lanes: Lanes for this rank, in the plan's order. They are the sections of the rank's own stream.
        relayed: The lanes that this rank relays on each of its sender links, with their destinations.
    """

    name: str
    sources: tuple[Source, ...]
    stored_checksums: StoredChecksums | None = None
    planned: SessionPlan | None = None
    lanes: tuple[int, ...] = ()
    relayed: tuple[Mapping[int, Destination], ...] = ()

    @classmethod
    def by_plan(cls, session: str, rank: str, planned: SessionPlan, engine_links: EngineLinks) -> ReceiveSession:
        """The receiving end of participant `rank`, whose `engine_links` are connected."""
        sources = []
        for link in planned.received_by(rank):
            lanes = {sender: frozenset(planned.lanes_to(rank, link, sender)) for sender in link.senders}
            hops = {
                sender: max(planned.routes[lane].hops_to(rank) for lane in sent)
                for sender, sent in lanes.items()
                if sent
            }
            sources.append(Source(engine_links.receivers[link.number], hops, lanes, link))
        own = sorted({lane for source in sources for sent in source.lanes.values() for lane in sent})
        relayed = destinations_of(rank, planned, engine_links.senders)
        return cls(session, tuple(sources), None, planned, tuple(own), tuple(relayed))

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
        # Versions share the objects `specs` and `slicing`, so that results cached for these objects hold for all versions.
        return sent, replace(sent.only(self.lanes), specs=self._own_layout.specs, slicing=self._own_layout.slicing)

    def expected_buckets(self, sent: Manifest, own: Manifest, source: Source) -> Iterator[ExpectedBucket]:
        """The buckets of a version that arrive from `source`, in the order they are sent."""
        if source.planned is None:
            (sender,) = source.hops
            for index in range(own.bucket_count):
                yield _expected(source, sender, own, index, index, None)
            return
        # The lanes for this rank are the sections of its own stream, bucket for bucket.
        own_index = {
            sent_as: index
            for section, lane in enumerate(self.lanes)
            for sent_as, index in zip(sent.buckets_of(lane), own.buckets_of(section), strict=True)
        }
        for turn in source.planned.turns(sent):
            if turn.lane in source.lanes[turn.sender]:
                yield _expected(source, turn.sender, own, own_index[turn.sent_as], turn.sent_as, turn.number)


def _expected(source: Source, sender: str, own: Manifest, index: int, sent_as: int, turn: int | None) -> ExpectedBucket:
    start, stop = own.window(index)
    return ExpectedBucket(source, sender, index, sent_as, turn, start, stop - start)
