"""`SendSession`: one trainer rank's end of a session, which sends directly to rollout ranks, or through rank 0 to a store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from weightlane.ckpt_engines import ClosedError, Deadline

from ..codecs.delta.encoding import delta_tables
from ..control.engine_links import EngineLinks
from ..control.messages import Connect, Go
from ..control.rendezvous import Rendezvous
from ..plan.session_plan import PlanExchange, SessionPlan
from ..version.bucket_checksums import StoredChecksums
from ..version.manifest import Manifest
from ..version.manifest_message import DeltaSegment
from ..version.packing import CopyTable, SnapshotSlice, StridedCopy, snapshot_slices
from .agreement import RankAgreement
from .bucket_source import BucketSource, GatheredBuckets, ShardGather, SnapshotBuckets
from .pipeline import Destination, SendPipeline, destinations_of
from .sending_rank import SendingRank
from .snapshot.snapshot import SourceBytes


class SendSession:
    """A trainer rank's end of one session. Opened on one thread, connected on another, closed from any.

    Attributes:
        name: The session.
        layout: The stream of full versions; set once connected.
        parts: The parts of this rank's snapshot in that stream; set once connected.
        pipeline: Sends buckets; None until connected, and on a rank that sends its bytes to rank 0.
        agreement: Exchanges values with the other trainer ranks; None until connected, and if there is one rank only.
    """

    layout: Manifest
    parts: Sequence[SnapshotSlice]

    def __init__(self, rank: SendingRank, name: str) -> None:
        self.name = name
        self.pipeline: SendPipeline | None = None
        self.agreement: RankAgreement | None = None
        self._rank = rank
        self._closed = False
        self._links = EngineLinks(rank.name, rank.engine, rank.device)
        self._lanes: dict[int, Destination] = {}
        self._tables: list[CopyTable] = []
        """The copies from each rank's snapshot to the stream, by rank, if rank 0 gathers; else those of this rank alone."""
        self._gather: ShardGather | None = None

    def connect(self, rendezvous: Rendezvous, message: Connect, deadline: Deadline) -> SessionPlan:
        """Connect to the receivers and the other trainer ranks. Returns the session's plan.

        Raises the error that prevents the connection, or `ClosedError` if the session is closed in the meantime.
        """
        try:
            planned = self._connect(rendezvous, message, deadline)
        except BaseException:
            self.close()
            raise
        if self._closed:  # `close` may have run before the pipeline or the links existed
            self.close()
            raise ClosedError("the connection was closed while connecting.", part=self._rank.name)
        return planned

    def _connect(self, rendezvous: Rendezvous, message: Connect, deadline: Deadline) -> SessionPlan:
        rank, publishers = self._rank, message.publishers
        if not rank.alone:
            self.agreement = RankAgreement(rendezvous.mailbox(f"agreement/{self.name}"), publishers, rank.number)
        exchange, supply = PlanExchange(rendezvous.mailbox(f"plan/{self.name}")), rank.supply_of(publishers)
        if rank.number == 0:
            exchange.supply(supply)
        planned = SessionPlan.of(supply, exchange.needed(message.needs, supply, deadline), rank.engine.capabilities)
        self.layout, regions = planned.layout, planned.layout.regions
        self.parts = snapshot_slices(rank.slices, rank.offsets, regions)
        if not rank.gathers:
            self._tables = [CopyTable.of(self.parts, self.layout)]
        else:
            self._tables = [CopyTable.of(parts, self.layout) for parts in rank.parts_of_all(regions)]
            self._gather = ShardGather.connect(
                rendezvous, self.name, publishers, rank.number, self.layout, rank.device, deadline
            )
        self._links.connect(rendezvous, self.name, planned, deadline)
        if not rank.gathers or rank.number == 0:
            checksums = StoredChecksums(rendezvous.mailbox(f"checksums/{self.name}")) if rank.stores else None
            links = list(self._links.senders.values())
            self.pipeline = SendPipeline(links, rank.runtime, checksums, rank.bucket_sent)
        for lanes in destinations_of(rank.name, planned, self._links.senders):
            self._lanes |= lanes
        return planned

    def send(self, manifest: Manifest, segments: Sequence[Sequence[DeltaSegment]], source: SourceBytes, go: Go) -> int:
        """Send this rank's bytes of a version as `go` requests. Returns their number. Raises the engine's error.

        Args:
            manifest: The version, as it was offered.
            segments: The segments of every rank in rank order, for a delta; empty for a dense version.
            source: The rank's bytes.
            go: Names the rollout ranks that accepted the version.
        """
        accepted, tables, buffers = set(go.receivers), self._tables, self._rank.buffers
        buckets: BucketSource
        if self._gather is not None:
            tables = delta_tables(segments) if manifest.is_delta else tables
            if self._rank.number != 0:
                return self._gather.give(manifest, tables[self._rank.number], source)
            buckets = GatheredBuckets(self._gather, source, tables, manifest, buffers)
        else:
            table = self._delta_table(manifest) if manifest.is_delta else tables[0]
            buckets = SnapshotBuckets(source, table, manifest, buffers)
        assert self.pipeline is not None, "connected"
        destinations: dict[int, Destination] = {}
        for lane, to in sorted(self._lanes.items()):
            # Receivers can join a store's session later, so the plan does not name all of them.
            accepting = go.receivers if self._rank.stores else [name for name in to.receivers if name in accepted]
            destinations |= dict.fromkeys(manifest.buckets_of(lane), replace(to, receivers=accepting))
        return self.pipeline.send_version(manifest, buckets, destinations, source.deadline, go.stall_s)

    def _delta_table(self, manifest: Manifest) -> CopyTable:
        """Copies of the segments of this rank's lanes, which lie back to back in its memory, to their places in the delta."""
        copies, offset = [], 0
        for lane in sorted(self._lanes):
            start, stop = manifest.bounds_of(lane)
            if start < stop:
                copies.append(StridedCopy.run(start, offset, stop - start))
            offset += stop - start
        return CopyTable(copies)

    def close(self) -> None:
        """Leave the session: its pending waits raise `ClosedError`. The links stay open until `close_links`. Idempotent."""
        self._closed = True
        for part in (self.pipeline, self.agreement, self._gather):
            if part is not None:
                part.close()

    def close_links(self) -> None:
        """Close the links, once no commit in a store needs them any more. Idempotent, never raises."""
        self._links.close()
