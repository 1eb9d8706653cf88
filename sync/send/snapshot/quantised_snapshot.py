"""Snapshots that quantise matrices: the live parameters are read once, and one byte of each element is kept.

Blocks that lie completely in a shard are quantised directly from the live parameters. A block that is divided between two ranks
has one scale, which depends on both ranks. Each rank copies its part of such a block unquantised, so that parameters may change
as soon as they were read, and quantises it when every rank has published its magnitudes (`PendingBlocks.cuts`). With blocks of
128 x 128 these parts are at most 254 rows and 254 columns of each shard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from ...codecs.quantised.block_fp8 import BLOCK
from ...codecs.quantised.quantisation import is_quantised, pair_of, scale_box
from ...version.box import Box
from ...version.tensor_spec import LocalShard, Shard, TensorSlice
from .quantised_blocks import QuantisedMatrix, QuantiseStep, regions_of
from .snapshot import Copy, Milestone, Snapshot, copies, device_of

_Key = tuple[str, Box]
_CHUNK_NUMEL = 4 << 20
"""Most elements of one step, so that waiting threads see progress within a large matrix."""


def quantised_slices(shards: Sequence[LocalShard]) -> list[Shard]:
    """The slices of a quantised version's tensors that a rank with these shards of the live parameters sends."""
    slices: list[Shard] = []
    for shard in shards:
        if not is_quantised(shard.spec):
            slices.append(shard)
            continue
        pair = pair_of(shard.spec)
        slices.append(TensorSlice(pair.weight, shard.box))
        slices.append(TensorSlice(pair.scales, scale_box(shard.box)))
    # A plan's stream has the slices of a tensor next to each other. A snapshot that is read in place must be that stream.
    turns = {name: turn for turn, name in enumerate(dict.fromkeys(each.spec.name for each in slices))}
    return sorted(slices, key=lambda each: (turns[each.spec.name], each.box.starts))


def quantised_snapshot(shards: Sequence[LocalShard], slices: Sequence[Shard], offsets: Sequence[int]) -> Snapshot:
    """The snapshot of these shards in which each of their `quantised_slices` begins at its offset in `offsets`.

    The unit of `Progress.wait_read` is steps.
    """
    first_bytes = dict(zip(map(_key, slices), offsets, strict=True))
    plain = sorted(
        ((first_bytes[_key(shard)], shard) for shard in shards if not is_quantised(shard.spec)),
        key=lambda pair: pair[0],
    )
    starts: list[tuple[int, Copy | QuantiseStep]] = [(copy.start, copy) for copy in copies(plain)]
    for shard in shards:
        if is_quantised(shard.spec):
            starts += _steps(shard, first_bytes)
    starts.sort(key=lambda step: step[0])
    nbytes = max((offset + each.nbytes for offset, each in zip(offsets, slices, strict=True)), default=0)
    # A step may write scales at a higher offset than elements that a later step writes. So bytes are final only up to the
    # first byte that any later step writes.
    unfinished = accumulate((start for start, _ in reversed(starts)), min, initial=nbytes)
    final = list(unfinished)[-2::-1]
    steps = [step for _, step in starts]
    milestones = [
        Milestone(step.run, until, number) for number, (step, until) in enumerate(zip(steps, final, strict=True), 1)
    ]
    ends = {step.matrix.name: number for number, step in enumerate(steps, 1) if isinstance(step, QuantiseStep)}
    copied = [(step.start, number) for number, step in enumerate(steps, 1) if isinstance(step, Copy)]
    for offset, shard in plain:
        numbers = (number for start, number in copied if start < offset + shard.nbytes)
        ends[shard.spec.name] = max(numbers, default=0)
    is_cut = any(isinstance(step, QuantiseStep) and step.is_cut for step in steps)
    # On one thread: steps add to `PendingBlocks`.
    return Snapshot(device_of(shards), milestones, nbytes, ends, len(steps), is_cut=is_cut)


def _key(each: Shard) -> _Key:
    return each.spec.name, each.box


def _steps(shard: LocalShard, first_bytes: Mapping[_Key, int]) -> Iterator[tuple[int, QuantiseStep]]:
    """Yield the steps of a shard in the order of its elements, each with the first byte that it writes."""
    pair = pair_of(shard.spec)
    own = scale_box(shard.box)
    matrix = QuantisedMatrix(shard, pair, first_bytes[_key(shard)], first_bytes[pair.scales.name, own])
    for region, is_cut in regions_of(shard.box, shard.spec.shape):
        rows = max(_CHUNK_NUMEL // region.shape[1] // BLOCK, 1) * BLOCK
        for first in range(0, region.shape[0], rows):
            starts = (region.starts[0] + first, region.starts[1])
            box = Box(starts, (min(rows, region.shape[0] - first), region.shape[1]))
            yield matrix.first_byte(box), QuantiseStep(matrix, box, is_cut)
