"""What a publisher sends through in one session: shards straight to whoever needs them, or gathered by rank 0 first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from weightlane.ckpt_engines import Deadline, SenderLink, Topology
from weightlane.ckpt_engines.runtime.devices import runtime_of

from ..codecs.delta.encoding import delta_manifest, delta_tables
from ..control.engine_links import EngineLinks
from ..control.messages import Connect
from ..control.rendezvous import Rendezvous
from ..plan.session_plan import SessionPlan
from ..version.bucket_checksums import StoredChecksums
from ..version.manifest import DeltaSegment, Manifest
from ..version.packing import CopyTable
from ..version.stream_parts import SnapshotPart
from ..version.strided_copy import StridedCopy
from .agreement.deltas import DeltaAgreement
from .agreement.magnitudes import MagnitudeAgreement
from .agreement.replicated_shards import ReplicaAgreement, ReplicaCheck
from .bucket_source import BucketSource, FromSnapshot, Packed
from .gather import ShardGather
from .pipeline import Destination, OnSent, SendPipeline
from .publication import Publication

Buffers = Callable[[int], Sequence[torch.Tensor]]
"""Gives two runs of memory of at least so many bytes, to pack into."""
Ready = Callable[[int], None]
"""Blocks until what is to be sent is there up to a byte."""


@dataclass(frozen=True, slots=True)
class SessionRequest:
    """A session that a publisher is to connect for."""

    name: str
    rank: int
    rendezvous: Rendezvous
    message: Connect
    deadline: Deadline
    uses_deltas: bool
    quantises: bool
    replicas: ReplicaCheck
    device: torch.device
    buffers: Buffers
    on_sent: OnSent

    @property
    def session(self) -> str:
        """Its name."""
        return self.message.session

    @property
    def alone(self) -> bool:
        """Whether there is one trainer rank."""
        return len(self.message.publishers) == 1

    def agreement(self) -> DeltaAgreement | None:
        """See `SendSession.agreement`."""
        if self.alone or not self.uses_deltas:
            return None
        return DeltaAgreement(self.rendezvous.mailbox(f"deltas/{self.session}"), self.message.publishers, self.rank)

    def magnitudes(self) -> MagnitudeAgreement | None:
        """See `SendSession.magnitudes`."""
        if self.alone or not self.quantises:
            return None
        return MagnitudeAgreement(
            self.rendezvous.mailbox(f"magnitudes/{self.session}"), self.message.publishers, self.rank
        )

    def replica_talk(self) -> ReplicaAgreement | None:
        """See `SendSession.replicas`."""
        if not self.replicas.needed:
            return None
        board = self.rendezvous.mailbox(f"replicas/{self.session}")
        return ReplicaAgreement(board, self.message.publishers, self.rank, self.replicas)

    def pipeline(self, links: Sequence[SenderLink], *, stores: bool = False) -> SendPipeline:
        """What sends through `links`, to a store or straight to receivers."""
        checksums = StoredChecksums(self.rendezvous.mailbox(f"checksums/{self.session}")) if stores else None
        return SendPipeline(self.session, links, runtime_of(self.device), checksums, self.on_sent)


@dataclass(frozen=True, slots=True)
class SendRequest:
    """A version that one rank is to send what it has of.

    Attributes:
        manifest: What it is offered as.
        segments: Of a delta, those of every rank, in rank order.
        memory: The rank's snapshot, or its segments of a delta back to back; 1-D uint8.
        ready: See `Ready`.
        receivers: Who accepted it.
        deadline: For all of it.
        stall_s: Longest time for one bucket, in seconds.
    """

    manifest: Manifest
    segments: Sequence[Sequence[DeltaSegment]]
    memory: torch.Tensor
    ready: Ready
    receivers: Sequence[str]
    deadline: Deadline
    stall_s: float


class SendSession(ABC):
    """Of one rank in one session. `close` may be called from any thread.

    Attributes:
        layout: The stream of versions that are sent in full.
        parts: What this rank sends of it.
        agreement: With the other ranks about deltas; None where there is but one rank, or no delta.
        magnitudes: With the other ranks about scales; None where there is but one rank, or nothing is quantised.
        replicas: With the other ranks about what several hold; None where none is held by several.
    """

    def __init__(
        self,
        opening: SessionRequest,
        layout: Manifest,
        parts: Sequence[SnapshotPart],
    ) -> None:
        self.session = opening.session
        self.layout = layout
        self.parts = parts
        self.agreement = opening.agreement()
        self.magnitudes = opening.magnitudes()
        self.replicas = opening.replica_talk()
        self._buffers = opening.buffers

    def delta(self, held: Publication, segments: Sequence[Sequence[DeltaSegment]]) -> Manifest:
        """The manifest of `held` as a delta to which the ranks contribute `segments`, in rank order."""
        assert held.base is not None
        base = (held.base.version, held.base.identity)
        return delta_manifest(self.layout, held.version, base, held.identity, segments)

    def dense(self, held: Publication) -> Manifest:
        """The manifest of `held` in full."""
        return self.layout.as_version(held.version, held.identity)

    @abstractmethod
    def send(self, version: SendRequest) -> int:
        """Send what this rank has of `version`; returns the bytes."""

    @property
    @abstractmethod
    def pipeline(self) -> SendPipeline | None:
        """What buckets are sent through; None on a rank that sends none."""

    def close(self) -> None:
        """Leave the session. Idempotent."""
        for part in (self.pipeline, self.agreement, self.magnitudes, self.replicas):
            if part is not None:
                part.close()


class GatheredSendSession(SendSession):
    """Rank 0 sends the one stream, filled from all ranks' snapshots.

    Making it connects.

    Args:
        opening: The session.
        layout: The stream, of whole tensors.
        tables: Where each rank's snapshot belongs in it, by rank.
        parts: What this rank has of it.
        sender: The engine's link on rank 0; whoever made it closes it.
        topology: Whom it connects.
        device: Where the snapshots are.

    Raises:
        WeightlaneError: What kept it from connecting; nothing is left open but `sender`.
    """

    def __init__(
        self,
        opening: SessionRequest,
        layout: Manifest,
        tables: Sequence[CopyTable],
        parts: Sequence[SnapshotPart],
        *,
        sender: SenderLink | None,
        topology: Topology,
        device: torch.device,
    ) -> None:
        super().__init__(opening, layout, parts)
        self._alone = opening.alone
        self._sender = sender
        self._pipeline = None if sender is None else opening.pipeline([sender], stores=True)
        self._gather: ShardGather | None = None
        session, deadline = opening.session, opening.deadline
        try:
            self._gather = ShardGather.connect(
                opening.rendezvous,
                session,
                opening.message.publishers,
                opening.rank,
                layout,
                tables,
                device,
                deadline,
            )
            if self._pipeline is not None:
                self._pipeline.connect(topology, deadline)
        except BaseException:
            self.close()
            raise

    @property
    def pipeline(self) -> SendPipeline | None:
        """See `SendSession.pipeline`."""
        return self._pipeline

    def send(self, version: SendRequest) -> int:
        """See `SendSession.send`."""
        gather, manifest = self._gather, version.manifest
        memory, ready, deadline = version.memory, version.ready, version.deadline
        assert gather is not None, "connected"
        tables = delta_tables(version.segments) if manifest.is_delta else gather.tables
        if self._pipeline is None or self._sender is None:
            return gather.give(manifest, tables, memory, ready, deadline)
        largest = manifest.largest_bucket_bytes
        source: BucketSource
        if self._alone:
            source = FromSnapshot(memory, tables[0], manifest, ready, lambda: self._buffers(largest))
        else:
            source = Packed(
                self._buffers(largest),
                manifest,
                lambda index, data: gather.fill(manifest, tables, memory, index, data, ready, deadline),
            )
        to = Destination(self._sender, version.receivers)
        everything = dict.fromkeys(range(manifest.bucket_count), to)
        return self._pipeline.send_version(manifest, source, deadline, destinations=everything, stall_s=version.stall_s)

    def close(self) -> None:
        """See `SendSession.close`."""
        super().close()
        if self._gather is not None:
            self._gather.close()


class DirectSendSession(SendSession):
    """Every rank sends its slices straight to the ranks that need them, or to those of them that hand them on to the others.

    Making it connects.

    Args:
        opening: The session.
        planned: Its plan.
        parts: What this rank has of the plan's stream.
        halves: Not connected yet; closed with this.

    Raises:
        WeightlaneError: What kept it from connecting; nothing is left open.
    """

    def __init__(
        self, opening: SessionRequest, planned: SessionPlan, parts: Sequence[SnapshotPart], halves: EngineLinks
    ) -> None:
        super().__init__(opening, planned.layout, parts)
        self._halves = halves
        try:
            halves.connect(opening.rendezvous, opening.session, planned, opening.deadline)
        except BaseException:
            halves.close()
            raise
        self._pipeline = opening.pipeline(list(halves.senders.values()))
        self._table = CopyTable.of(parts, planned.layout)
        self._lanes = {
            lane: Destination(halves.senders[link.number], planned.routes[lane].next_after(opening.name))
            for link in planned.sent_by(opening.name)
            for lane in link.lanes[opening.name]
        }

    @property
    def pipeline(self) -> SendPipeline:
        """See `SendSession.pipeline`."""
        return self._pipeline

    def send(self, version: SendRequest) -> int:
        """See `SendSession.send`. The manifest of a delta says where the segments are."""
        manifest = version.manifest
        table = _delta_table(manifest, self._lanes) if manifest.is_delta else self._table
        to: dict[int, Destination] = {}
        accepted = set(version.receivers)
        for lane, everybody in sorted(self._lanes.items()):
            accepting = [name for name in everybody.receivers if name in accepted]
            to |= dict.fromkeys(manifest.buckets_of(lane), replace(everybody, receivers=accepting))
        largest = manifest.largest_bucket_bytes
        source = FromSnapshot(version.memory, table, manifest, version.ready, lambda: self._buffers(largest))
        return self._pipeline.send_version(
            manifest, source, version.deadline, destinations=to, buckets=to, stall_s=version.stall_s
        )

    def close(self) -> None:
        """See `SendSession.close`."""
        super().close()
        self._halves.close()


def _delta_table(manifest: Manifest, lanes: Iterable[int]) -> CopyTable:
    """Where the segments of `lanes`, back to back in a rank's memory, belong in a delta."""
    pieces, place = [], 0
    for lane in sorted(lanes):
        start, stop = manifest.bounds_of(lane)
        if start < stop:
            pieces.append(StridedCopy.run(start, place, stop - start))
        place += stop - start
    return CopyTable(pieces)
