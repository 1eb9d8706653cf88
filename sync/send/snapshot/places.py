"""Where the shards of a rank lie in its snapshot: one after the other, or as in the stream that is read there in place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ...version.box import Box
from ...version.manifest import Manifest, aligned
from ...version.tensor_spec import Shard, TensorSlice


def compact_places(shards: Sequence[Shard]) -> list[int]:
    """First byte of each shard in a snapshot where aligned shards follow each other."""
    places, place = [], 0
    for shard in shards:
        places.append(place)
        place += aligned(shard.nbytes)
    return places


def share_places(shards: Sequence[Shard], slices: Sequence[TensorSlice]) -> list[int]:
    """First byte of each shard in a snapshot where the aligned `slices`, each of which has all of some shards, follow each other.

    A stream has whole slices, so it can be read in place even if a rank holds them in pieces. Pieces that are not contiguous in
    their slice are aligned, each of them, as in `compact_places`.
    """
    by_name = defaultdict[str, list[tuple[Box, int]]](list)
    for each, place in zip(slices, compact_places(slices), strict=True):
        by_name[each.spec.name].append((each.box, place))
    places = []
    for shard in shards:
        box, place = next(each for each in by_name[shard.spec.name] if each[0].intersect(shard.box) == shard.box)
        run = shard.box.within(box).run(box.shape)
        if run is None:
            return compact_places(shards)
        places.append(place + run[0] * shard.spec.dtype.itemsize)
    return places


def stream_places(shards: Sequence[Shard], layout: Manifest) -> list[int] | None:
    """First byte of each shard in a snapshot that is the stream itself; None if a shard is not contiguous in its tensor."""
    offsets = {spec.name: offset for spec, offset in zip(layout.specs, layout.offsets, strict=True)}
    places = []
    for shard in shards:
        run = shard.box.run(shard.spec.shape) if shard.numel else (0, 0)
        if run is None:
            return None  # columns
        places.append(offsets[shard.spec.name] + run[0] * shard.spec.dtype.itemsize)
    return places
