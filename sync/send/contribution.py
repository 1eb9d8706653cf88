"""`Contribution`: the slices that one trainer rank sends of every version, and the snapshot that they are sent from."""

from __future__ import annotations

from collections.abc import Sequence

from weightlane.ckpt_engines import ManifestError

from ..codecs.quantised.quantisation import quantised_placement, wire_specs
from ..config import Quantise, Relay
from ..plan import HolderMap
from ..plan.plan_exchange import Supply
from ..version.manifest import Manifest
from ..version.packing import CopyTable, compact_places, stream_places
from ..version.placement import Placement
from ..version.snapshot_slices import SnapshotSlice, snapshot_slices
from ..version.tensor_spec import LazyShard, LocalShard, Shard, TensorSlice
from .agreement.replicated_shards import ReplicatedShards
from .snapshot.quantised_snapshot import QuantisedShards
from .snapshot.snapshot import Snapshot

_PART = "publisher"


class Contribution:
    """The slices that every trainer rank sends of a version, and this rank's snapshot.

    The assignment of slices to ranks depends only on the placements, so it is the same for all receivers. For the other arguments
    and the errors see `Publisher`.

    Args:
        checksummed: Whether buckets have checksums.
        stored: Whether the engine stores versions and needs one stream of full tensors.
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        rank: int,
        shards: Sequence[LocalShard],
        quantise: Quantise,
        *,
        bucket_bytes: int,
        checksummed: bool,
        stored: bool,
    ) -> None:
        self.rank = rank
        self.bucket_bytes, self._checksummed = bucket_bytes, checksummed
        holdings = HolderMap.of({str(number): each for number, each in enumerate(placements)})
        self.replicated = ReplicatedShards(holdings.replicated(), shards)
        """The slices that several ranks hold."""
        self.device = next((shard.data.device for shard in shards), None)
        """Device of the parameters; None on a rank without shards."""
        shares = list(holdings.assign().values())
        # In the order of a plan's stream, so that a snapshot that is read in place is the stream.
        names = dict.fromkeys(spec.name for share in shares for spec in share.specs)
        turns = {name: turn for turn, name in enumerate(names)}
        own = sorted(_cut(shards, shares[rank]), key=lambda shard: (turns[shard.spec.name], shard.starts))
        specs = list({spec.name: spec for each in placements for spec in each.specs}.values())
        self.scheme = "" if quantise == "none" else quantise
        """How linear weights are quantised; see `Manifest`."""
        self.slices: Sequence[Shard] = own
        """The slices that this rank sends."""
        quantised: QuantisedShards | None = None
        if quantise != "none":
            quantised = QuantisedShards(own)
            specs = wire_specs(specs)
            shares = [quantised_placement(each) for each in shares]
            self.slices = quantised.slices
        self._shares = shares
        """The slices that each rank sends, in rank order."""
        self.numel = sum(mine.numel for mine in self.slices)
        """Elements that this rank sends."""
        self.stored_layout: Manifest | None = None
        """Layout of the stream of full tensors; None unless the engine stores versions."""
        if stored:
            self.stored_layout = Manifest(
                0, tuple(specs), bucket_bytes, whole_tensors=True, checksummed=checksummed, quantised=self.scheme
            )
        self.offsets = compact_places(self.slices)
        """First byte of each of `slices` in the snapshot. If this is the only rank and the engine stores versions, the snapshot
        is laid out as the stored stream, if possible."""
        if self.stored_layout is not None and self.alone:
            self.offsets = stream_places(self.slices, self.stored_layout) or self.offsets
        self.snapshot = Snapshot.of(own, self.offsets) if quantised is None else quantised.snapshot(self.offsets)
        self.snapshot_bytes = self.snapshot.nbytes
        """Size of a snapshot's memory."""
        if self.stored_layout is not None and self.alone:
            self.snapshot_bytes = max(self.snapshot_bytes, self.stored_layout.total_bytes)

    @property
    def alone(self) -> bool:
        """Whether there is one trainer rank."""
        return len(self._shares) == 1

    def supply(self, publishers: Sequence[str], relay: Relay) -> Supply:
        """The slices that all `publishers` send, for the session's plan; `relay` as in `Supply`."""
        shares = dict(zip(publishers, self._shares, strict=True))
        return Supply(shares, self.bucket_bytes, self._checksummed, self.scheme, relay)

    def parts(self, regions: Sequence[TensorSlice]) -> list[SnapshotSlice]:
        """The parts of this rank's snapshot that a stream of `regions` contains."""
        return snapshot_slices(self.slices, self.offsets, regions)

    def stored_tables(self, layout: Manifest) -> list[CopyTable]:
        """The copies from each rank's snapshot to the stream of full tensors `layout`, by rank."""
        regions = layout.regions
        parts = []
        for share in self._shares:
            theirs = [LazyShard(spec, box) for spec, box in share.slices]
            parts.append(snapshot_slices(theirs, compact_places(theirs), regions))
        parts[self.rank] = self.parts(regions)
        return [CopyTable.of(each, layout) for each in parts]


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
                part=_PART,
                hint="Give every rank the placements of all ranks' shards, in rank order.",
            )
    return cut
