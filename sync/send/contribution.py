"""What one trainer rank contributes to the versions of a run, and the snapshot it does so from."""

from __future__ import annotations

from collections.abc import Sequence

from weightlane.ckpt_engines import ManifestError

from ..codecs.quantised.quantisation import quantised_placement, wire_specs
from ..config import Quantise
from ..plan import Holdings
from ..version.manifest import Manifest
from ..version.packing import CopyTable, compact_places, stream_places
from ..version.placement import Placement
from ..version.stream_parts import parts_of
from ..version.tensor_spec import Held, HeldSlice, LocalShard
from .agreement.replicated_shards import ReplicaCheck
from .snapshot.quantised_snapshot import QuantisedShards
from .snapshot.snapshot import Snapshot

_PART = "publisher"


class Contribution:
    """What every rank sends of a version, and what this one does.

    Who sends what follows from what the ranks hold, and from nothing else: it is the same for whatever receivers there are.

    Args:
        placements: What each trainer rank holds, in rank order.
        rank: This rank.
        shards: What it holds.
        quantise: What linear weights become; see `SyncConfig`.

    Raises:
        ManifestError: The ranks together do not hold every element, or this one not what its placement says.
        ConfigError: Nothing can be quantised, or not as it is sharded.
    """

    def __init__(
        self, placements: Sequence[Placement], rank: int, shards: Sequence[LocalShard], quantise: Quantise
    ) -> None:
        holdings = Holdings.of({str(number): each for number, each in enumerate(placements)})
        sent = list(holdings.shares().values())
        self.replicas = ReplicaCheck(holdings.replicated(), shards)
        """What other ranks hold as well."""
        # In the order of a plan's stream, so that what is looked at in a snapshot is the stream.
        names = dict.fromkeys(spec.name for share in sent for spec in share.specs)
        turns = {name: turn for turn, name in enumerate(names)}
        self._shards = sorted(_cut(shards, sent[rank]), key=lambda shard: (turns[shard.spec.name], shard.starts))
        specs = list({spec.name: spec for each in placements for spec in each.specs}.values())
        self._quantised: QuantisedShards | None = None
        if quantise == "none":
            self.specs = tuple(specs)
            """Every tensor of a version."""
            self.shares = tuple(sent)
            """What each rank sends of them, in rank order."""
            self.held: Sequence[Held] = self._shards
            """What this rank sends of them."""
        else:
            self._quantised = QuantisedShards(self._shards, quantise)
            self.specs = tuple(wire_specs(specs, quantise))
            self.shares = tuple(quantised_placement(each, quantise) for each in sent)
            self.held = self._quantised.held
        self.scheme = "" if quantise == "none" else quantise
        """As what linear weights are quantised; see `Manifest`."""
        self.rank = rank
        self.device = next((shard.data.device for shard in shards), None)
        """Where the parameters are."""
        self.numel = sum(mine.numel for mine in self.held)
        """Elements that this rank sends."""

    def layout(self, bucket_bytes: int, *, checksummed: bool) -> Manifest:
        """The stream of whole tensors, as engines that store want it; see `Manifest`."""
        return Manifest(0, self.specs, bucket_bytes, whole_tensors=True, checksummed=checksummed, quantised=self.scheme)

    def places(self, layout: Manifest | None) -> list[int]:
        """First byte of each of `held` in the snapshot: where it is in the stream `layout`, if this rank alone sends that."""
        alone = layout is not None and len(self.shares) == 1
        in_stream = stream_places(self.held, layout) if layout is not None and alone else None
        return compact_places(self.held) if in_stream is None else in_stream

    def snapshot(self, places: Sequence[int]) -> Snapshot:
        """Taken into such places."""
        return Snapshot(self._shards, places) if self._quantised is None else self._quantised.snapshot(places)

    def tables(self, layout: Manifest, places: Sequence[int]) -> list[CopyTable]:
        """Where each rank's snapshot belongs in the stream of whole tensors `layout`; in this rank's, `held` are at `places`."""
        regions = layout.regions
        tables = []
        for rank, share in enumerate(self.shares):
            theirs: Sequence[Held] = [HeldSlice(spec, box) for spec, box in share.slices]
            where: Sequence[int] = compact_places(theirs)
            if rank == self.rank:
                theirs, where = self.held, places
            tables.append(CopyTable.of(parts_of(theirs, where, regions), layout))
        return tables


def _cut(shards: Sequence[LocalShard], share: Placement) -> list[LocalShard]:
    """The parts of `shards` that are in `share`. Raises `ManifestError` if the shards are not what they were said to be."""
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
