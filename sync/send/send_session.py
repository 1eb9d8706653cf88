"""`SendingRank`: the slices that one trainer rank sends of every version, and its engine, snapshots and memory.

`SendSession`: its end of one session, which sends directly to rollout ranks, or through rank 0 to a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from weightlane.ckpt_engines import CheckpointEngine, ClosedError, Deadline, Delivery, ManifestError
from weightlane.ckpt_engines.contract.engine import engine_label
from weightlane.ckpt_engines.runtime.devices import buffer_device, runtime_of
from weightlane.plugins import RunHooks

from ..codecs.codec_choice import CodecChooser
from ..codecs.delta.encoding import DeltaEncoder, delta_tables
from ..codecs.quantised.quantisation import quantised_shares
from ..config import SyncConfig
from ..control.engine_links import EngineLinks
from ..control.messages import Connect, EngineTraits, Go
from ..control.rendezvous import Rendezvous
from ..plan import HolderMap
from ..plan.links import check_relay
from ..plan.session_plan import PlanExchange, SessionPlan, Supply
from ..version.bucket_checksums import StoredChecksums
from ..version.manifest import Manifest
from ..version.manifest_message import DeltaSegment
from ..version.packing import CopyTable, SnapshotSlice, StridedCopy, snapshot_slices
from ..version.placement import Placement
from ..version.tensor_spec import LocalShard, Shard, TensorSlice
from .bucket_source import BucketSource, GatheredBuckets, ShardGather, SnapshotBuckets
from .pipeline import Destination, SendPipeline, destinations_of
from .rank_agreement import RankAgreement, ReplicatedShards
from .snapshot.places import compact_places, share_places, stream_places
from .snapshot.quantised_snapshot import QuantisedShards
from .snapshot.send_memory import PackingBuffers, SendMemory, SnapshotSlots
from .snapshot.snapshot import Snapshot, SourceBytes


class SendingRank:
    """The slices of one trainer rank, and the engine, memory and snapshots with which it sends them, over all sessions.

    The assignment of slices to ranks depends only on the placements, so it is the same for all receivers. For the arguments and
    the errors see `Publisher`.

    Attributes:
        name: The publisher.
        number: The trainer rank.
        slices: The slices that this rank sends of a version.
        offsets: First byte of each of them in a snapshot.
        device: Device of buckets and snapshots.
    """

    def __init__(
        self,
        name: str,
        engine: CheckpointEngine,
        shards: Sequence[LocalShard],
        placements: Sequence[Placement],
        rank: int,
        config: SyncConfig,
        hooks: RunHooks,
    ) -> None:
        check_relay(config.relay, engine_label(engine), engine.capabilities)
        self.name, self.number, self.engine = name, rank, engine
        self.deadline_s, self.hooks = config.deadline_s, hooks
        self.stores = engine.capabilities.persistent
        self.alone = len(placements) == 1
        self.gathers = self.stores and not self.alone
        """Whether rank 0 sends the bytes of all ranks."""
        holdings = HolderMap.of({str(number): each for number, each in enumerate(placements)})
        self.replicated = ReplicatedShards(holdings.replicated(), shards)
        """The slices that several ranks hold."""
        shares = holdings.assign()
        # In the order of a plan's stream, so that a snapshot that is read in place is the stream.
        turns = {name: turn for turn, name in enumerate(dict.fromkeys(_names(shares.values())))}
        own = sorted(_cut(shards, shares[str(rank)]), key=lambda shard: (turns[shard.spec.name], shard.starts))
        self.slices: Sequence[Shard] = own
        quantised: QuantisedShards | None = None
        if config.quantised:
            quantised = QuantisedShards(own)
            shares = quantised_shares(shares)
            self.slices = quantised.slices
        self._supply = Supply.of(shares, config)
        if quantised is None:
            slices = [TensorSlice(spec, box) for spec, box in shares[str(rank)].slices]
            self.offsets = share_places(own, sorted(slices, key=lambda each: (turns[each.spec.name], each.box.starts)))
        else:
            self.offsets = compact_places(self.slices)
        if self.stores and self.alone:  # the snapshot is laid out as the stored stream, if possible
            self.offsets = stream_places(self.slices, self._supply.stored_layout) or self.offsets
        self.snapshot = Snapshot.of(own, self.offsets) if quantised is None else quantised.snapshot(self.offsets)
        held = next((shard.data.device for shard in shards), None)
        self.device = buffer_device(engine.capabilities.devices, held, name)
        self.runtime = runtime_of(self.device)
        owner = None if self.gathers else engine  # the engine never reads a snapshot that is gathered
        nbytes = self.snapshot.nbytes
        if self.stores and self.alone:
            nbytes = max(nbytes, self._supply.stored_layout.total_bytes)
        self.slots = SnapshotSlots(
            lambda: SendMemory(owner, nbytes, self.device, copied_from=self.snapshot.runtime), name
        )
        self.delta_memory = SendMemory(owner, 0, self.device)
        """Memory for the segments of the newest delta; it grows as needed."""
        self.buffers = PackingBuffers(engine, self.device)
        self.encoder = DeltaEncoder(self.slices, self.offsets)
        self.chooser = CodecChooser(config.codec, config.full_every)

    @property
    def numel(self) -> int:
        """Elements that this rank sends."""
        return sum(mine.numel for mine in self.slices)

    @property
    def quantises(self) -> bool:
        """Whether linear weights are quantised."""
        return bool(self._supply.quantised)

    def supply_of(self, publishers: Sequence[str]) -> Supply:
        """The slices that all `publishers` send, in rank order, for the session's plan."""
        return replace(self._supply, shares=dict(zip(publishers, self._supply.shares.values(), strict=True)))

    def parts_of_all(self, regions: Sequence[TensorSlice]) -> Iterator[list[SnapshotSlice]]:
        """For each trainer rank, the parts of its snapshot that a stream of `regions` contains. Rank 0 gathers them."""
        for number, share in enumerate(self._supply.shares.values()):
            theirs = [TensorSlice(spec, box) for spec, box in share.slices]
            slices, offsets = (self.slices, self.offsets) if number == self.number else (theirs, compact_places(theirs))
            yield snapshot_slices(slices, offsets, regions)

    @property
    def traits(self) -> EngineTraits | None:
        """The engine's traits on rank 0, which reports them for all ranks; None on the other ranks."""
        if self.number != 0:
            return None
        facts = self.engine.capabilities
        return EngineTraits(
            selective=not facts.delivery.isdisjoint({Delivery.POINT_TO_POINT, Delivery.STORE}),
            elastic=facts.elastic,
            persistent=facts.persistent,
        )

    def bucket_sent(self, version: int, index: int, nbytes: int, seconds: float) -> None:
        """Report a sent bucket to the observers."""
        facts = {"seconds": seconds, "nbytes": nbytes, "participant": self.name}
        self.hooks.bucket_sent(version=version, index=index, facts=facts)

    def close(self) -> None:
        """Free all memory and end the threads. No thread may be reading the memory."""
        self.snapshot.close()
        self.slots.close()
        self.delta_memory.close()
        self.buffers.close()


def _names(shares: Iterable[Placement]) -> Iterator[str]:
    return (spec.name for share in shares for spec in share.specs)


def _cut(shards: Sequence[LocalShard], share: Placement) -> list[LocalShard]:
    """The parts of `shards` that are in `share`. Raises `ManifestError` if elements are missing."""
    by_name: dict[str, list[LocalShard]] = {}
    for shard in shards:
        by_name.setdefault(shard.spec.name, []).append(shard)
    cut = []
    for spec, box in share.slices:
        left = box.numel
        for shard in by_name.get(spec.name, ()):
            if (common := box.intersect(shard.box)) is not None:
                left -= common.numel
                cut.append(LocalShard(spec, common.starts, shard.data[common.within(shard.box).index]))
        if left:
            raise ManifestError(
                f"{spec.name} is not held as its placement says: {left} elements of {box} are missing.",
                part="publisher",
                hint="Give every rank the placements of all ranks' shards, in rank order.",
            )
    return cut


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
