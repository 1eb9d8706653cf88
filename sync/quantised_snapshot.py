"""A snapshot of which the matrices are quantised on the way: the live parameters are read once, and one byte of each is kept.

Blocks that lie whole in a shard are quantised straight from the live parameters. Those that a cut between two ranks divides have
one scale, which depends on both: what a rank has of such blocks is copied as it is, so that parameters may change as soon as they
were read, and quantised when every rank has said how large its part is (`Remains.cuts`). With blocks of 128 x 128 that is at most
254 rows and 254 columns of each shard; where the rows of an int8 matrix are divided, it is all of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

import torch

from weightlane.ckpt_engines import WeightlaneError

from .boxes import Box, row_major_strides
from .codecs.quantised import QUANTISERS, QuantisationReport, Quantiser, Scheme
from .progress import Progress
from .quantisation import QuantisedPair, is_quantised, pair_of, scale_box, touched_blocks
from .snapshot import Copy, Milestone, Remains, Snapshot, copies, runtime_of_shards
from .tensor_spec import Held, HeldSlice, LocalShard

_Key = tuple[str, Box]
_CHUNK_NUMEL = 4 << 20
"""Elements that are quantised, at most, before those who wait for them hear of it."""
_SAMPLED_ROWS = 16
"""Rows of each chunk of which the error is computed."""


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """How large some elements of a matrix are."""

    name: str
    """The matrix."""
    blocks: Box
    """In which of its blocks."""
    values: torch.Tensor
    """float32 of the shape of `blocks`: the largest magnitude in each."""


@dataclass(frozen=True, slots=True)
class _Matrix:
    """A slice of a matrix that a rank holds, and where in the snapshot it goes."""

    shard: LocalShard
    pair: QuantisedPair
    scheme: Scheme
    weight_place: int
    """First byte of its elements."""
    scale_place: int
    """First byte of the scales that are this rank's to send."""

    @property
    def name(self) -> str:
        return self.pair.weight.name

    @property
    def quantiser(self) -> Quantiser:
        return QUANTISERS[self.scheme]

    @property
    def own(self) -> Box:
        """The scales that are this rank's to send."""
        return scale_box(self.pair, self.shard.box, self.scheme)

    def data(self, box: Box) -> torch.Tensor:
        """Some of its elements, as they are now."""
        return self.shard.data.detach()[box.within(self.shard.box).index]

    def magnitudes(self, box: Box, data: torch.Tensor) -> Magnitudes:
        """Of `data`, which is in `box`."""
        values = self.quantiser.magnitudes(data, at=_corner(box), name=self.name)
        return Magnitudes(self.name, touched_blocks(self.pair, box, self.scheme), values)

    def put(self, memory: torch.Tensor, box: Box, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Quantise `data`, which is in `box`, to where it goes, or on its device, and copy it. Returns what came out.

        `scales` are those of all blocks that it touches; those that are this rank's to send go to their place, too.
        """
        at, out = _corner(box), _place_of(memory, self.weight_place, self.pair.weight.dtype, self.shard.box, box)
        direct = out if out.device == data.device else None
        quantised = self.quantiser.quantise(data, scales, at=at, name=self.name, out=direct)
        if direct is None:
            out.copy_(quantised, non_blocking=True)
        if (mine := scale_box(self.pair, box, self.scheme)).numel:
            touched = touched_blocks(self.pair, box, self.scheme)
            into = _place_of(memory, self.scale_place, torch.float32, self.own, mine)
            into.copy_(scales[mine.within(touched).index], non_blocking=True)
        return quantised

    def first_byte(self, box: Box) -> int:
        """The first byte of the snapshot that quantising `box` makes."""
        first = self.weight_place + _offset(self.shard.box, box) * self.pair.weight.dtype.itemsize
        mine = scale_box(self.pair, box, self.scheme)
        if not mine.numel:
            return first
        return min(first, self.scale_place + _offset(self.own, mine) * self.pair.scales.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class CutBlocks:
    """Elements of blocks of which this rank holds a part, as they were."""

    matrix: _Matrix
    box: Box
    """Where in the matrix they are."""
    data: torch.Tensor

    def quantise(self, largest: torch.Tensor, memory: torch.Tensor) -> QuantisationReport:
        """Put them into the snapshot. Returns the error.

        `largest` is the largest magnitude in each block of the matrix, float32 of the shape of its scales.
        """
        matrix, touched = self.matrix, touched_blocks(self.matrix.pair, self.box, self.matrix.scheme)
        scales = matrix.quantiser.scales_of(largest[touched.index].to(self.data.device))
        quantised = matrix.put(memory, self.box, self.data, scales)
        return matrix.quantiser.report(self.data, quantised, scales, at=_corner(self.box))

    @property
    def pair(self) -> QuantisedPair:
        """The matrix."""
        return self.matrix.pair


@dataclass(frozen=True, slots=True)
class _Step:
    """Whole blocks, or parts of some that are cut."""

    matrix: _Matrix
    box: Box
    is_cut: bool

    def run(self, memory: torch.Tensor, remains: Remains) -> None:
        matrix, box = self.matrix, self.box
        data = matrix.data(box)
        magnitudes = matrix.magnitudes(box, data)
        if self.is_cut:
            remains.cuts.append(CutBlocks(matrix, box, data.clone()))
            remains.magnitudes.append(magnitudes)
            return
        scales = matrix.quantiser.scales_of(magnitudes.values)
        quantised = matrix.put(memory, box, data, scales)
        few = slice(0, _SAMPLED_ROWS)
        height, _ = matrix.quantiser.block_shape(box.shape[1])
        bands = slice(0, -(-_SAMPLED_ROWS // height))
        remains.error += matrix.quantiser.report(data[few], quantised[few], scales[bands], at=_corner(box))


class QuantisedShards:
    """What a rank holds of a quantised version.

    Args:
        shards: Of the parameters.
        scheme: What linear weights become.
    """

    def __init__(self, shards: Sequence[LocalShard], scheme: Scheme) -> None:
        self._shards = list(shards)
        self._scheme = scheme
        self.held: list[Held] = []
        """What it holds of the version's tensors."""
        for shard in shards:
            if not is_quantised(shard.spec):
                self.held.append(shard)
                continue
            pair = pair_of(shard.spec, scheme)
            differing = _differing(shard, pair, scheme) if shard.numel else None
            self.held.append(HeldSlice(pair.weight, shard.box, differing))
            self.held.append(HeldSlice(pair.scales, scale_box(pair, shard.box, scheme)))

    def snapshot(self, places: Sequence[int]) -> Snapshot:
        """Taken into memory where each of `held` begins at one of `places`."""
        return _QuantisedSnapshot(self._shards, dict(zip(map(_key, self.held), places, strict=True)), self._scheme)


class _QuantisedSnapshot(Snapshot):
    """See the module's docstring. How far it has read is counted in steps."""

    def __init__(self, shards: Sequence[LocalShard], places: Mapping[_Key, int], scheme: Scheme) -> None:
        super().__init__([], [])
        self.runtime = runtime_of_shards(shards)
        self._stream = self.runtime.new_stream()
        self._workers = 1  # steps add to `Remains`
        plain: list[tuple[int, LocalShard]] = []
        steps: list[tuple[int, Copy | _Step]] = []
        """The first byte that it makes, and the step; in the order of the elements."""
        for shard in shards:
            if is_quantised(shard.spec):
                steps += _steps(shard, places, scheme)
            else:
                plain.append((places[_key(shard)], shard))
        plain.sort(key=lambda placed: placed[0])
        steps += [(copy.start, copy) for copy in copies(plain)]
        steps.sort(key=lambda step: step[0])
        self.nbytes = max(
            (places[_key(held)] + held.nbytes for held in QuantisedShards(shards, scheme).held), default=0
        )
        missing = accumulate((start for start, _ in reversed(steps)), min, initial=self.nbytes)
        """The first byte that is not there yet, by how many steps are left."""
        done = list(missing)[-2::-1]
        self._milestones = [
            Milestone(step, until, number) for number, ((_, step), until) in enumerate(zip(steps, done, strict=True), 1)
        ]
        self.is_cut = any(isinstance(step, _Step) and step.is_cut for _, step in steps)
        self.read_end = len(steps)
        self.ends = {}
        for number, (_, step) in enumerate(steps, 1):
            if not isinstance(step, Copy):
                self.ends[step.matrix.name] = number
        starts = [(copy.start, number) for number, (_, copy) in enumerate(steps, 1) if isinstance(copy, Copy)]
        for place, shard in plain:
            self.ends[shard.spec.name] = max(
                (number for start, number in starts if start < place + shard.nbytes), default=0
            )

    def take(
        self,
        memory: torch.Tensor,
        after: Any,
        progress: Progress,
        remains: Remains | None = None,
    ) -> None:
        """As `Snapshot.take`. A version that cannot be quantised fails alone: parameters may change then."""
        try:
            super().take(memory, after, progress, remains)
        except WeightlaneError:
            progress.advance(progress.done_bytes, self.read_end)
            raise

    def _tell(self, done_bytes: int, read: int, progress: Progress) -> None:
        progress.advance(done_bytes, read)


def _key(held: Held) -> _Key:
    return held.spec.name, held.box


def _differing(shard: LocalShard, pair: QuantisedPair, scheme: Scheme) -> Callable[[torch.Tensor], float] | None:
    """What becomes of one block, or of some rows, compared with what became of it: see `HeldSlice.differing`.

    None where every row of an int8 matrix is divided: too much of a scale is not known here.
    """
    quantiser, regions = QUANTISERS[scheme], list(_regions(shard.box, pair, scheme))
    whole = [box for box, is_cut in regions if not is_cut]
    if scheme == "int8" and not whole:
        return None
    region = max(whole, key=lambda box: box.numel) if whole else regions[0][0]
    sample = _middle(region, (_SAMPLED_ROWS, pair.weight.shape[1]) if scheme == "int8" else _block(pair, scheme))
    inside = sample.within(shard.box).index

    def differing(old: torch.Tensor) -> float:
        data = shard.data.detach()[inside]
        scales = quantiser.scales_of(quantiser.magnitudes(data, at=_corner(sample)))
        new = quantiser.quantise(data, scales, at=_corner(sample))
        differ = new.to(old.device).view(torch.uint8) != old.view(shard.box.shape)[inside].contiguous().view(
            torch.uint8
        )
        return int(torch.count_nonzero(differ)) / differ.numel()

    return differing


def _middle(box: Box, size: tuple[int, int]) -> Box:
    """About the middle one of the parts of `box`, `size` large, that begin at a border between them."""
    starts = tuple(
        start + (count // most // 2) * most for start, count, most in zip(box.starts, box.shape, size, strict=True)
    )
    return Box(starts, tuple(min(most, stop - at) for at, stop, most in zip(starts, box.stops, size, strict=True)))


def _block(pair: QuantisedPair, scheme: Scheme) -> tuple[int, int]:
    return QUANTISERS[scheme].block_shape(pair.weight.shape[1])


def _regions(box: Box, pair: QuantisedPair, scheme: Scheme) -> Iterator[tuple[Box, bool]]:
    """A slice of a matrix cut at blocks: what consists of whole blocks, and parts of others; and whether it is such parts."""
    sides = zip(box.starts, box.stops, _block(pair, scheme), pair.weight.shape, strict=True)
    rows, columns = (list(_runs(*side)) for side in sides)
    for (top, bottom, cut_above), (left, right, cut_beside) in product(rows, columns):
        yield Box((top, left), (bottom - top, right - left)), cut_above or cut_beside


def _runs(start: int, stop: int, block: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """Indices cut at the borders of blocks: a part of one, whole ones together, a part of another; and whether it is a part."""
    first = min(stop, -(-start // block) * block)
    last = stop if stop == size else max(first, stop // block * block)
    for begin, end, is_part in ((start, first, True), (first, last, False), (last, stop, True)):
        if begin < end:
            yield begin, end, is_part


def _steps(shard: LocalShard, places: Mapping[_Key, int], scheme: Scheme) -> Iterator[tuple[int, _Step]]:
    pair = pair_of(shard.spec, scheme)
    own = scale_box(pair, shard.box, scheme)
    matrix = _Matrix(shard, pair, scheme, places[_key(shard)], places[pair.scales.name, own])
    height, _ = _block(pair, scheme)
    for region, is_cut in _regions(shard.box, pair, scheme):
        rows = max(_CHUNK_NUMEL // region.shape[1] // height, 1) * height
        for first in range(0, region.shape[0], rows):
            starts = (region.starts[0] + first, region.starts[1])
            box = Box(starts, (min(rows, region.shape[0] - first), region.shape[1]))
            yield matrix.first_byte(box), _Step(matrix, box, is_cut)


def _corner(box: Box) -> tuple[int, int]:
    row, column = box.starts
    return row, column


def _offset(outer: Box, box: Box) -> int:
    """Number of the first element of `box` among those of `outer`."""
    strides = row_major_strides(outer.shape)
    return sum(start * stride for start, stride in zip(box.within(outer).starts, strides, strict=True))


def _place_of(memory: torch.Tensor, place: int, dtype: torch.dtype, outer: Box, box: Box) -> torch.Tensor:
    """Where the elements of `box` go, if those of `outer` go to `memory`, 1-D uint8, from byte `place` on."""
    flat = memory[place : place + outer.numel * dtype.itemsize].view(dtype)
    return flat.view(outer.shape)[box.within(outer).index]
