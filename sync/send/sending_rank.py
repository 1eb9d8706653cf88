"""`SendingRank`: the slices that one trainer rank sends of every version, and its engine, snapshots and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from weightlane.ckpt_engines import CheckpointEngine, Delivery, ManifestError
from weightlane.ckpt_engines.contract.engine import engine_label
from weightlane.ckpt_engines.links.link import buffer_device
from weightlane.ckpt_engines.runtime.devices import runtime_of
from weightlane.plugins import RunHooks

from ..codecs.codec_choice import CodecChooser
from ..codecs.delta.encoding import DeltaEncoder
from ..codecs.quantised.quantisation import quantised_shares
from ..config import SyncConfig
from ..control.messages import EngineTraits
from ..plan import HolderMap
from ..plan.links import check_relay
from ..plan.session_plan import Supply
from ..version.packing import SnapshotSlice, compact_places, snapshot_slices, stream_places
from ..version.placement import Placement
from ..version.tensor_spec import LocalShard, Shard, TensorSlice
from .agreement import ReplicatedShards
from .snapshot.quantised_snapshot import QuantisedShards
from .snapshot.send_memory import PackingBuffers, SendMemory, SnapshotSlots
from .snapshot.snapshot import Snapshot


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
        self.offsets = compact_places(self.slices)
        if self.stores and self.alone:  # the snapshot is laid out as the stored stream, if possible
            self.offsets = stream_places(self.slices, self._supply.stored_layout) or self.offsets
        self.snapshot = Snapshot.of(own, self.offsets) if quantised is None else quantised.snapshot(self.offsets)
        held = next((shard.data.device for shard in shards), None)
        self.device = buffer_device(engine, held, name)
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
