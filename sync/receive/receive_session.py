"""`ReceiveSession`: the links through which one rollout rank receives in a session, and the buckets expected on each.

`Relay`: forwards one version to other rollout ranks; each verified bucket is sent from the memory it is in.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightlane.ckpt_engines import Bucket, Deadline, ReceiverLink, WeightlaneError, as_weightlane_error
from weightlane.plugins import RunHooks

from ..control.engine_links import EngineLinks
from ..plan.links import PlannedLink
from ..plan.session_plan import SessionPlan
from ..send.pipeline import BucketsInFlight, Destination, destinations_of
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
    lanes: Mapping[str, frozenset[int]]
    """Lanes for this rank, by sender."""
    planned: PlannedLink
    """The link in the session's plan."""

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
    turn: int
    """Number of its turn on the link."""
    offset: int
    """First byte in this rank's own stream, or in a delta's segments."""
    nbytes: int


class ReceiveSession:
    """The receiving end of participant `rank` in the session `name`.

    Args:
        name: The session.
        rank: The participant.
        planned: The session's plan.
        links: The rank's connected links.
        stored_checksums: Checksums of versions in a store; None where each checksum arrives with its bucket.

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
        self.relayed = destinations_of(rank, planned, links.senders)

    def manifest(self, offer: Any) -> tuple[Manifest, Manifest]:
        """Parse an offer. Returns the manifest as sent, and that of this rank's own stream. Raises `ProtocolError`."""
        sent, layout = self._planned.layout.offered(offer), self._own_layout
        if not sent.is_delta:
            return sent, layout.as_version(sent.version, sent.identity)
        # Versions share the objects `specs` and `slicing`, so that results cached for these objects hold for all versions.
        return sent, replace(sent.only(self._lanes), specs=layout.specs, slicing=layout.slicing)

    def expected_buckets(self, sent: Manifest, own: Manifest, source: Source) -> Iterator[ExpectedBucket]:
        """The buckets of a version that arrive from `source`, in the order they are sent."""
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


_MOST_IN_FLIGHT = 8
"""Most buckets posted to a link at a time, equal to `BucketSink.most_in_flight`. They are sent without a copy."""


class Relay:
    """Relays one version from participant `rank`, with `stall_s` seconds as the limit for one bucket.

    `manifest` is the manifest as sent. `links` has, for each link, the lanes that `rank` relays on it and their destinations,
    from `destinations_of`.

    Receiving threads call `on_bucket`, which never waits. A thread for each link runs `send`, which sends the lanes in order. A
    slow receiver therefore delays only the receivers after it in the route, and no two ranks wait for each other.
    """

    def __init__(
        self,
        links: Iterable[Mapping[int, Destination]],
        manifest: Manifest,
        deadline: Deadline,
        stall_s: float,
        rank: str,
        hooks: RunHooks,
    ) -> None:
        self._manifest = manifest
        self._deadline = deadline
        self._stall_s = stall_s
        self._rank = rank
        self._hooks = hooks
        self._relayed = {index for lanes in links for lane in lanes for index in manifest.buckets_of(lane)}
        self._changed = threading.Condition()
        self._ready: dict[int, tuple[torch.Tensor, str]] = {}
        """Verified buckets to be sent, with their checksums, by index in the version as sent."""
        self._error: WeightlaneError | None = None

    def on_bucket(self, index: int, data: torch.Tensor, checksum: str) -> None:
        """Add the verified bucket `index`; its bytes must stay unchanged until it is sent."""
        if index in self._relayed:
            with self._changed:
                self._ready[index] = data, checksum
                self._changed.notify_all()

    def give_up(self, error: BaseException) -> None:
        """Make `send` raise `error`, because no further bucket will arrive."""
        with self._changed:
            self._error = self._error or as_weightlane_error(error, self._rank)
            self._changed.notify_all()

    def send(self, lanes: Mapping[int, Destination]) -> None:
        """Send every bucket of the `lanes` of one link. Raises the engine's error, or the one passed to `give_up`."""
        in_flight = BucketsInFlight(self._deadline, self._stall_s, self._on_sent)
        for lane, destination in lanes.items():
            for index in self._manifest.buckets_of(lane):
                while in_flight and (len(in_flight) >= _MOST_IN_FLIGHT or not self._is_ready(index)):
                    in_flight.end_oldest()
                data, checksum = self._take(index)
                in_flight.post(Bucket(self._manifest.version, index, data), destination, checksum)
        in_flight.end_all()

    def _is_ready(self, index: int) -> bool:
        with self._changed:
            return index in self._ready

    def _take(self, index: int) -> tuple[torch.Tensor, str]:
        with self._changed:
            self._changed.wait_for(lambda: index in self._ready or self._error is not None, self._deadline.remaining_s)
            if self._error is not None:
                raise self._error
            if index not in self._ready:
                raise self._deadline.error(f"bucket {index} of version {self._manifest.version}", part=self._rank)
            return self._ready.pop(index)

    def _on_sent(self, version: int, index: int, nbytes: int, seconds: float) -> None:
        facts = {"seconds": seconds, "nbytes": nbytes, "participant": self._rank, "relayed": True}
        self._hooks.bucket_sent(version=version, index=index, facts=facts)
