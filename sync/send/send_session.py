"""`SendSession`: one trainer rank's end of a session, which sends directly to rollout ranks, or through rank 0 to a store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from weightlane.ckpt_engines import ClosedError, Deadline, SenderLink, Topology
from weightlane.ckpt_engines.links.bounded_calls import address_of, close_all
from weightlane.ckpt_engines.links.sender_link import make_sender_link

from ..codecs.delta.encoding import delta_tables
from ..control.engine_links import EngineLinks
from ..control.messages import Connect
from ..control.rendezvous import Rendezvous
from ..plan.plan_exchange import PlanExchange
from ..plan.session_plan import SessionPlan
from ..version.bucket_checksums import StoredChecksums
from ..version.manifest import Manifest
from ..version.manifest_message import DeltaSegment
from ..version.packing import CopyTable
from ..version.snapshot_slices import SnapshotSlice
from ..version.strided_copy import StridedCopy
from .agreement.rank_agreement import RankAgreement
from .bucket_source import BucketSource, SnapshotBuckets
from .gather import GatheredBuckets, ShardGather
from .pipeline import Destination, SendPipeline, destinations_of
from .sender_resources import SenderResources
from .snapshot.progress import SourceBytes


@dataclass(frozen=True, slots=True)
class SendRequest:
    """A version whose bytes a rank is to send.

    Attributes:
        manifest: The version, as it was offered.
        segments: The segments of every rank in rank order, for a delta; empty for a dense version.
        source: The rank's bytes.
        receivers: The rollout ranks that accepted the version.
        stall_s: Longest time for one bucket, in seconds.
    """

    manifest: Manifest
    segments: Sequence[Sequence[DeltaSegment]]
    source: SourceBytes
    receivers: Sequence[str]
    stall_s: float


def open_session(rank: SenderResources, name: str) -> SendSession:
    """Open session `name`, with the class that the rank's engine needs. It is connected later."""
    layout = rank.contribution.stored_layout
    return DirectSendSession(rank, name) if layout is None else GatheredSendSession(rank, name, layout)


class SendSession(ABC):
    """A trainer rank's end of one session. Opened on one thread, connected on another, closed from any.

    Attributes:
        name: The session.
        layout: The stream of full versions; set once connected.
        parts: The parts of this rank's snapshot in that stream; set once connected.
        pipeline: Sends buckets; None until connected, and on a rank that sends its bytes to rank 0.
        agreement: Exchanges values with the other trainer ranks; None until connected, and if there is one rank only.
        stores: Whether versions can be read again without the trainer.
    """

    layout: Manifest
    parts: Sequence[SnapshotSlice]
    stores = False

    def __init__(self, rank: SenderResources, name: str) -> None:
        self.name = name
        self.pipeline: SendPipeline | None = None
        self.agreement: RankAgreement | None = None
        self._rank = rank
        self._closed = False
        self._store_link: SenderLink | None = None

    def address(self) -> dict[str, Any]:
        """This rank's address for receivers; empty if addresses are exchanged per link. Raises `DeadlineExceededError`."""
        return {}

    def connect(
        self, rendezvous: Rendezvous, message: Connect, topology: Topology, deadline: Deadline
    ) -> SessionPlan | None:
        """Connect to the receivers and the other trainer ranks. Returns the session's plan, if there is one.

        Raises the error that prevents the connection, or `ClosedError` if the session is closed in the meantime.
        """
        if not self._rank.contribution.alone:
            mailbox = rendezvous.mailbox(f"agreement/{self.name}")
            self.agreement = RankAgreement(mailbox, message.publishers, self._rank.number)
        try:
            planned = self._connect(rendezvous, message, topology, deadline)
        except BaseException:
            self.close()
            raise
        if self._closed:  # `close` may have run before the pipeline or the links existed
            self.close()
            raise ClosedError("the connection was closed while connecting.", part=self._rank.name)
        return planned

    @abstractmethod
    def _connect(
        self, rendezvous: Rendezvous, message: Connect, topology: Topology, deadline: Deadline
    ) -> SessionPlan | None:
        """See `connect`."""

    @abstractmethod
    def send(self, version: SendRequest) -> int:
        """Send this rank's bytes of a version. Returns their number. Raises the engine's error."""

    def close(self) -> None:
        """Leave the session: its pending waits raise `ClosedError`. A store's link stays open until `close_store`. Idempotent."""
        self._closed = True
        for part in (self.pipeline, self.agreement):
            if part is not None:
                part.close()

    def close_store(self) -> None:
        """Close the link to a store, once no commit needs it any more. Idempotent, never raises."""
        close_all([] if self._store_link is None else [self._store_link], self._rank.name)


class GatheredSendSession(SendSession):
    """A session in which rank 0 sends one stream of full tensors, gathered from all ranks' snapshots, to a store."""

    stores = True

    def __init__(self, rank: SenderResources, name: str, layout: Manifest) -> None:
        super().__init__(rank, name)
        self.layout = layout
        self._tables: Sequence[CopyTable] = ()
        if rank.number == 0:
            self._store_link = make_sender_link(rank.engine, rank.name, rank.device)
        self._gather: ShardGather | None = None

    def address(self) -> dict[str, Any]:
        """See `SendSession.address`."""
        return {} if self._store_link is None else address_of(self._store_link, self._rank.name)

    def _connect(self, rendezvous: Rendezvous, message: Connect, topology: Topology, deadline: Deadline) -> None:
        rank = self._rank
        if rank.number == 0:
            supply = rank.contribution.supply(message.publishers, rank.relay)
            PlanExchange(rendezvous.mailbox(f"plan/{self.name}")).supply(supply)
        self.parts = rank.contribution.parts(self.layout.regions)
        self._tables = rank.contribution.stored_tables(self.layout)
        if self._store_link is not None:
            checksums = StoredChecksums(rendezvous.mailbox(f"checksums/{self.name}"))
            self.pipeline = SendPipeline([self._store_link], rank.runtime, checksums, rank.bucket_sent)
        self._gather = ShardGather.connect(
            rendezvous, self.name, message.publishers, rank.number, self.layout, rank.device, deadline
        )
        if self.pipeline is not None:
            self.pipeline.connect(topology, deadline)

    def send(self, version: SendRequest) -> int:
        """See `SendSession.send`."""
        assert self._gather is not None, "connected"
        manifest, source = version.manifest, version.source
        tables = delta_tables(version.segments) if manifest.is_delta else self._tables
        if self.pipeline is None or self._store_link is None:
            return self._gather.give(manifest, tables[self._rank.number], source)
        buckets: BucketSource
        if self._rank.contribution.alone:
            buckets = SnapshotBuckets(source, tables[0], manifest, self._rank.buffers)
        else:
            buckets = GatheredBuckets(self._gather, source, tables, manifest, self._rank.buffers)
        to = Destination(self._store_link, version.receivers)
        everything = dict.fromkeys(range(manifest.bucket_count), to)
        return self.pipeline.send_version(manifest, buckets, everything, source.deadline, version.stall_s)

    def close(self) -> None:
        """See `SendSession.close`."""
        super().close()
        if self._gather is not None:
            self._gather.close()


class DirectSendSession(SendSession):
    """A session in which every rank sends its slices directly to the ranks that need them, or to the first relays."""

    def __init__(self, rank: SenderResources, name: str) -> None:
        super().__init__(rank, name)
        self._links = EngineLinks(rank.name, rank.engine, rank.device)
        self._table = CopyTable([])
        self._lanes: dict[int, Destination] = {}

    def _connect(self, rendezvous: Rendezvous, message: Connect, topology: Topology, deadline: Deadline) -> SessionPlan:
        del topology  # each link has its own
        rank = self._rank
        planned = _plan(rank, rendezvous, message, deadline)
        self.layout = planned.layout
        self.parts = rank.contribution.parts(self.layout.regions)
        self._links.connect(rendezvous, self.name, planned, deadline)
        self.pipeline = SendPipeline(list(self._links.senders.values()), rank.runtime, on_sent=rank.bucket_sent)
        self._table = CopyTable.of(self.parts, self.layout)
        for lanes in destinations_of(rank.name, planned, self._links.senders):
            self._lanes |= lanes
        return planned

    def send(self, version: SendRequest) -> int:
        """See `SendSession.send`. The manifest of a delta has the places of the segments."""
        assert self.pipeline is not None, "connected"
        manifest, source, accepted = version.manifest, version.source, set(version.receivers)
        table = self._delta_table(manifest) if manifest.is_delta else self._table
        destinations: dict[int, Destination] = {}
        for lane, to in sorted(self._lanes.items()):
            accepting = [name for name in to.receivers if name in accepted]
            destinations |= dict.fromkeys(manifest.buckets_of(lane), replace(to, receivers=accepting))
        buckets = SnapshotBuckets(source, table, manifest, self._rank.buffers)
        return self.pipeline.send_version(manifest, buckets, destinations, source.deadline, version.stall_s)

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
        """See `SendSession.close`."""
        super().close()
        self._links.close()


def _plan(rank: SenderResources, rendezvous: Rendezvous, message: Connect, deadline: Deadline) -> SessionPlan:
    """Compute the session's plan, as every participant does."""
    exchange = PlanExchange(rendezvous.mailbox(f"plan/{message.session}"))
    supply = rank.contribution.supply(message.publishers, rank.relay)
    if rank.number == 0:
        exchange.supply(supply)
    needed = exchange.needed(message.needs, supply, deadline)
    return SessionPlan(supply, needed, rank.engine.capabilities)
