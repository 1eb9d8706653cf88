"""`ReceiveSession`: the links through which one rollout rank receives in a session, and the buckets expected on each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weightlane.ckpt_engines import ReceiverLink

from ..control.engine_links import EngineLinks
from ..plan.links import PlannedLink
from ..plan.session_plan import SessionPlan
from ..send.pipeline import destinations_of
from ..version.bucket_checksums import StoredChecksums
from ..version.manifest import Manifest, aligned


@dataclass(frozen=True, slots=True)
class Source:
    """A receiver link, and the participants that send buckets to this rank on it. The buckets arrive in order."""

    link: ReceiverLink
    hops: Mapping[str, int]
    """Number of hops from the trainer to this rank, on the longest route among a sender's lanes, by sender."""
    lanes: Mapping[str, frozenset[int]]
    """Lanes for this rank, by sender."""
    planned: PlannedLink
    """The link in the session's plan."""


@dataclass(frozen=True, slots=True)
class ExpectedBucket:
    """A bucket that a receiver waits for."""

    source: Source
    sender: str
    index: int
    """Index in this rank's own stream."""
    sent_as: int
    """Index in the version as sent."""
    turn: int
    """Number of its turn on the link."""
    offset: int
    """First byte in this rank's own stream, or in a delta's segments."""
    nbytes: int


class ReceiveSession:
    """The receiving end of participant `rank` in the session `name`.

    Attributes:
        sources: Links with buckets for this rank, all received from concurrently.
        relayed: The lanes that this rank relays on each of its sender links, with their destinations.
    """

    def __init__(
        self,
        name: str,
        rank: str,
        planned: SessionPlan,
        links: EngineLinks,
        stored_checksums: StoredChecksums | None = None,
    ) -> None:
        self.name, self.stored_checksums = name, stored_checksums
        self._planned = planned
        self.sources = []
        for link in planned.received_by(rank):
            lanes = {sender: frozenset(planned.lanes_to(rank, link, sender)) for sender in link.senders}
            hops = {
                sender: max(planned.routes[lane].hops_to(rank) for lane in sent)
                for sender, sent in lanes.items()
                if sent
            }
            self.sources.append(Source(links.receivers[link.number], hops, lanes, link))
        self._lanes = sorted({lane for source in self.sources for sent in source.lanes.values() for lane in sent})
        """Lanes for this rank. They are the sections of its own stream."""
        self._own_layout = planned.layout.only(self._lanes)
        self._dense: dict[int, Sequence[ExpectedBucket]] = {}
        """The expected buckets of dense versions, by number of the link in the plan."""
        self.relayed = destinations_of(rank, planned, links.senders)

    def manifest(self, offer: Any) -> tuple[Manifest, Manifest]:
        """Parse an offer. Returns the manifest as sent, and that of this rank's own stream. Raises `ProtocolError`."""
        sent, layout = self._planned.layout.offered(offer), self._own_layout
        if not sent.is_delta:
            return sent, layout.as_version(sent.version, sent.identity)
        # Versions share the objects `specs` and `slicing`, so that results cached for these objects hold for all versions.
        return sent, replace(sent.only(self._lanes), specs=layout.specs, slicing=layout.slicing)

    def live_bytes(self, manifest: Manifest) -> int:
        """Bytes of one bucket for each sender on each link: if they shared a buffer, two ranks might wait for each other."""
        return sum(len(source.hops) for source in self.sources) * aligned(manifest.largest_bucket_bytes)

    def expected_buckets(self, sent: Manifest, own: Manifest, source: Source) -> Sequence[ExpectedBucket]:
        """The buckets of a version that arrive from `source`, in the order they are sent: the same for all dense versions."""
        if sent.is_delta:
            return list(self._expected(sent, own, source))
        number = source.planned.number
        if number not in self._dense:
            self._dense[number] = list(self._expected(sent, own, source))
        return self._dense[number]

    def _expected(self, sent: Manifest, own: Manifest, source: Source) -> Iterator[ExpectedBucket]:
        own_index = {
            sent_as: index
            for section, lane in enumerate(self._lanes)
            for sent_as, index in zip(sent.buckets_of(lane), own.buckets_of(section), strict=True)
        }
        for turn in source.planned.turns(sent):
            if turn.lane in source.lanes[turn.sender]:
                index = own_index[turn.sent_as]
                start, stop = own.window(index)
                yield ExpectedBucket(source, turn.sender, index, turn.sent_as, turn.number, start, stop - start)
