"""Packing: from the snapshots of trainer ranks to buckets.

Every trainer rank copies only its own shards into one flat *snapshot* in the wire dtype. A `SnapshotSlice` has the places of
elements in a snapshot and in the stream; a `StridedCopy` copies rows of equal length at equal distances in one call. If the bytes
of a bucket lie in a snapshot as in the stream, the bucket is sent from it in place. Otherwise the bucket is filled from one
snapshot, or from those of all ranks, so that no rank ever holds a large tensor in full.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from weightlane.ckpt_engines.runtime.tensor_bytes import copy_bytes

from .box import Box, cut, row_major_strides
from .manifest import Manifest
from .tensor_spec import Shard, TensorSlice


@dataclass(frozen=True, slots=True)
class StridedRows:
    """`count` rows of `nbytes` each, `step` bytes from one to the next, the first at byte `start`."""

    start: int
    step: int
    nbytes: int
    count: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + (self.count - 1) * self.step + self.nbytes

    @property
    def is_contiguous(self) -> bool:
        """Whether there is no gap between rows."""
        return self.count == 1 or self.step == self.nbytes

    def moved(self, nbytes: int) -> StridedRows:
        """The same rows, with `nbytes` added to their start."""
        return StridedRows(self.start + nbytes, self.step, self.nbytes, self.count)

    def part(self, row: int, count: int, skipped: int, nbytes: int) -> StridedRows:
        """The part with `count` rows from row `row` on, and of each row `nbytes` bytes from byte `skipped` on."""
        return StridedRows(self.start + row * self.step + skipped, self.step, nbytes, count)


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Rows of the stream, and the same rows in a rank's snapshot."""

    stream: StridedRows
    snapshot: StridedRows

    @classmethod
    def run(cls, stream: int, snapshot: int, nbytes: int) -> StridedCopy:
        """A copy of one row."""
        return cls(StridedRows(stream, nbytes, nbytes, 1), StridedRows(snapshot, nbytes, nbytes, 1))

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.stream.nbytes * self.stream.count

    def within(self, start: int, stop: int) -> Iterator[StridedCopy]:
        """The part in the stream window [`start`, `stop`): complete rows, and the parts of the first and last row."""
        rows = self.stream
        step = max(rows.step, 1)
        row = max(0, (start - rows.start - rows.nbytes) // step + 1)
        last = min(rows.count - 1, (stop - 1 - rows.start) // step)
        while row <= last:
            at = rows.start + row * rows.step
            low, high = max(at, start), min(at + rows.nbytes, stop)
            if high - low == rows.nbytes:
                ends = rows.start + last * rows.step + rows.nbytes
                count = last - row + (1 if ends <= stop else 0)
            else:
                count = 1
            if low < high:
                yield StridedCopy(
                    *(side.part(row, count, low - at, high - low) for side in (self.stream, self.snapshot))
                )
            row += count

    def can_follow(self, copies: Sequence[StridedCopy]) -> bool:
        """Whether this row continues the rows `copies` at the same distance; rows may neither overlap nor go backwards."""
        first, last = copies[0], copies[-1]
        if self.stream.count > 1 or last.stream.count > 1 or self.stream.nbytes != last.stream.nbytes:
            return False
        steps = _steps(last, self)
        return min(steps) >= self.stream.nbytes and (len(copies) == 1 or steps == _steps(first, copies[1]))


@dataclass(frozen=True, slots=True)
class PackedCopy:
    """A `StridedCopy`, and the places of its rows in a buffer that has all rows of a window back to back."""

    stream: StridedRows
    snapshot: StridedRows
    packed: StridedRows


@dataclass(frozen=True, slots=True)
class BucketCopies:
    """A rank's bytes in one window of the stream, in as few copies as possible."""

    copies: Sequence[PackedCopy]
    nbytes: int
    snapshot_end: int
    """One past the last byte of the snapshot that is needed."""
    unbroken: bool
    """Whether the bytes lie back to back in the snapshot, too."""
    shift: int | None
    """Offset in the snapshot minus offset in the stream, in bytes; None if it differs between the copies."""

    @classmethod
    def of(cls, copies: Iterable[StridedCopy]) -> BucketCopies:
        """Merge copies that follow each other."""
        merged: list[PackedCopy] = []
        nbytes = 0
        for copy in _equal_rows_merged(_adjoining_merged(copies)):
            each, count = copy.stream.nbytes, copy.stream.count
            merged.append(PackedCopy(copy.stream, copy.snapshot, StridedRows(nbytes, each, each, count)))
            nbytes += each * count
        contiguous = all(copy.snapshot.is_contiguous for copy in merged)
        starts = [copy.snapshot.start for copy in merged[1:]]
        unbroken = contiguous and all(copy.snapshot.end == start for copy, start in zip(merged, starts, strict=False))
        shifts = {copy.snapshot.start - copy.stream.start for copy in merged}
        parallel = len(shifts) == 1 and all(copy.snapshot.step == copy.stream.step for copy in merged)
        end = max((copy.snapshot.end for copy in merged), default=0)
        return cls(merged, nbytes, end, unbroken, shifts.pop() if parallel else None)


def copy_strided(target: torch.Tensor, to: StridedRows, source: torch.Tensor, rows: StridedRows) -> None:
    """Copy `rows` of `source` to the rows `to` of `target`, both 1-D uint8."""
    if to.count == 1:
        copy_bytes(target[to.start : to.start + to.nbytes], source[rows.start : rows.start + rows.nbytes])
        return
    into, out = (
        flat.as_strided((side.count, side.nbytes), (side.step, 1), flat.storage_offset() + side.start)
        for flat, side in ((target, to), (source, rows))
    )
    into.copy_(out)


def _steps(one: StridedCopy, other: StridedCopy) -> tuple[int, int]:
    return other.stream.start - one.stream.start, other.snapshot.start - one.snapshot.start


def _equal_rows_merged(copies: Iterable[StridedCopy]) -> Iterator[StridedCopy]:
    """Merge rows of equal length at equal distances, if the distances are equal on both sides."""
    group: list[StridedCopy] = []
    for copy in copies:
        if group and not copy.can_follow(group):
            yield _merged(group)
            group = []
        group.append(copy)
    if group:
        yield _merged(group)


def _merged(group: Sequence[StridedCopy]) -> StridedCopy:
    first, count = group[0], len(group)
    if count == 1:
        return first
    sides = zip((first.stream, first.snapshot), _steps(first, group[1]), strict=True)
    return StridedCopy(*(StridedRows(side.start, step, side.nbytes, count) for side, step in sides))


def _adjoining_merged(copies: Iterable[StridedCopy]) -> Iterator[StridedCopy]:
    """Merge rows that begin where the row before ends, on both sides."""
    last: StridedCopy | None = None
    for copy in copies:
        if last is not None and _adjoin(last, copy):
            last = StridedCopy.run(last.stream.start, last.snapshot.start, last.nbytes + copy.nbytes)
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def _adjoin(last: StridedCopy, copy: StridedCopy) -> bool:
    return (
        last.stream.count == copy.stream.count == 1
        and last.stream.end == copy.stream.start
        and last.snapshot.end == copy.snapshot.start
    )


@dataclass(frozen=True, slots=True)
class SnapshotSlice:
    """The elements that a tensor of the stream and a shard in a snapshot have in common."""

    tensor: int
    """Index of the tensor in the stream."""
    box: Box
    """The slice of the tensor that the elements are."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    first: int
    """Offset of the first element in the snapshot, in elements."""
    strides: tuple[int, ...]
    """Strides in the snapshot, in elements."""
    dtype: torch.dtype

    def view(self, snapshot: torch.Tensor) -> torch.Tensor:
        """The elements, as a view of `snapshot` (1-D uint8) with the slice's shape."""
        flat = snapshot[: snapshot.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return flat.as_strided(self.box.shape, self.strides, flat.storage_offset() + self.first)

    @property
    def end(self) -> int:
        """One past the last byte in the snapshot."""
        return (self.first + _dot((size - 1 for size in self.box.shape), self.strides) + 1) * self.dtype.itemsize

    def cut(self, most: int) -> Iterator[SnapshotSlice]:
        """Cut the slice into parts of at most `most` elements, in the order of the elements."""
        for box in cut(self.box, most):
            first = self.first + _dot(box.within(self.box).starts, self.strides)
            yield SnapshotSlice(self.tensor, box, self.shape, first, self.strides, self.dtype)

    def copies(self, offset: int) -> Iterator[StridedCopy]:
        """The copies between the snapshot and a stream in which the tensor begins at byte `offset`."""
        strides = row_major_strides(self.shape)
        width = self.dtype.itemsize
        sides = list(zip(self.box.shape, strides, self.strides, strict=True))
        for stream, snapshot, length, count, steps in _common_rows(_dot(self.box.starts, strides), self.first, sides):
            rows = [
                StridedRows(start * width, step * width, length * width, count)
                for start, step in zip((stream, snapshot), steps, strict=True)
            ]
            yield StridedCopy(rows[0].moved(offset), rows[1])


def snapshot_slices(
    shards: Sequence[Shard], places: Sequence[int], regions: Sequence[TensorSlice]
) -> list[SnapshotSlice]:
    """Intersect a rank's shards with the tensors of a stream.

    Args:
        shards: The rank's shards.
        places: First byte of each shard in the rank's snapshot, where the shard lies in row-major order.
        regions: For each tensor of the stream, the slice of a checkpoint tensor that it is.

    Returns:
        Slices in the order of `regions`.
    """
    by_name: dict[str, list[tuple[Shard, int]]] = defaultdict(list)
    for shard, place in zip(shards, places, strict=True):
        if shard.numel:
            by_name[shard.spec.name].append((shard, place))
    return [
        _slice(tensor, region.box, common, shard, place)
        for tensor, region in enumerate(regions)
        for shard, place in by_name.get(region.spec.name, ())
        if (common := region.box.intersect(shard.box)) is not None
    ]


def _slice(tensor: int, region: Box, common: Box, shard: Shard, place: int) -> SnapshotSlice:
    strides, dtype = row_major_strides(shard.box.shape), shard.spec.dtype
    first = place // dtype.itemsize + _dot(common.within(shard.box).starts, strides)
    return SnapshotSlice(tensor, common.within(region), region.shape, first, strides, dtype)


def _dot(index: Iterable[int], strides: tuple[int, ...]) -> int:
    return sum(map(operator.mul, index, strides))


def _common_rows(
    one: int, other: int, sides: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int, int, tuple[int, int]]]:
    """Divide a slice into rows that are contiguous both in the stream and in the snapshot, which have different strides.

    Args:
        one: First element on one side.
        other: First element on the other side.
        sides: Size and both strides of each dimension, outermost first.

    Yields:
        First element on each side, length of a row, number of rows, and the step between rows on each side.
    """
    left = [side for side in sides if side[0] != 1]
    length = 1
    while left and left[-1][1] == left[-1][2] == length:
        length *= left.pop()[0]
    count, steps = 1, (length, length)
    if left:
        count, *_ = last = left.pop()
        steps = last[1], last[2]
        while left and left[-1][1] == steps[0] * count and left[-1][2] == steps[1] * count:
            count *= left.pop()[0]
    for number in range(math.prod(size for size, *_ in left)):
        first, second, rest = one, other, number
        for size, stride, other_stride in reversed(left):
            rest, at = divmod(rest, size)
            first += at * stride
            second += at * other_stride
        yield first, second, length, count, steps


_KEPT_WINDOWS = 1 << 14
"""Limit for the windows whose copies are kept for the next version, which bounds their memory."""


class CopyTable:
    """The copies between one rank's snapshot and the stream."""

    def __init__(self, copies: Iterable[StridedCopy]) -> None:
        self._copies = sorted(copies, key=lambda copy: copy.stream.start)
        # The largest end up to each copy: the rows of one copy may lie between the rows of another.
        self._reach = list(accumulate((copy.stream.end for copy in self._copies), max))
        self._windows: dict[tuple[int, int], BucketCopies] = {}

    @classmethod
    def of(cls, slices: Iterable[SnapshotSlice], layout: Manifest) -> CopyTable:
        """The table of a rank whose snapshot has these slices of the stream `layout`."""
        offsets = layout.offsets
        return cls(copy for each in slices for copy in each.copies(offsets[each.tensor]))

    def within(self, start: int, stop: int) -> Iterator[StridedCopy]:
        """The parts of the copies in the stream window [`start`, `stop`)."""
        for copy in self._copies[bisect_right(self._reach, start) :]:
            if copy.stream.start >= stop:
                return
            yield from copy.within(start, stop)

    def window(self, start: int, stop: int) -> BucketCopies:
        """The copies of the stream window [`start`, `stop`); cached."""
        window = self._windows.get((start, stop))
        if window is None:
            if len(self._windows) >= _KEPT_WINDOWS:
                self._windows.clear()
            window = self._windows[start, stop] = BucketCopies.of(self.within(start, stop))
        return window

    def bytes_within(self, start: int, stop: int) -> int:
        """Bytes of the window that this rank holds."""
        return self.window(start, stop).nbytes

    def snapshot_end(self, start: int, stop: int) -> int:
        """One past the last byte of the snapshot that the window needs."""
        return self.window(start, stop).snapshot_end


def copy_runs(snapshot: torch.Tensor, table: CopyTable, start: int, stop: int, payload: torch.Tensor) -> None:
    """Copy this rank's bytes of the window to their places in `payload` (uint8, as long as the window)."""
    for copy in table.window(start, stop).copies:
        copy_strided(payload, copy.stream.moved(-start), snapshot, copy.snapshot)


def gather_runs(snapshot: torch.Tensor, table: CopyTable, start: int, stop: int, packed: torch.Tensor) -> torch.Tensor:
    """This rank's bytes of the window, back to back: a view of the snapshot if they are contiguous there, else in `packed`."""
    window = table.window(start, stop)
    if window.unbroken:
        return snapshot[window.snapshot_end - window.nbytes : window.snapshot_end]
    for copy in window.copies:
        copy_strided(packed, copy.packed, snapshot, copy.snapshot)
    return packed[: window.nbytes]


def scatter_runs(packed: torch.Tensor, table: CopyTable, start: int, stop: int, payload: torch.Tensor) -> None:
    """Copy bytes that `gather_runs` returned on another rank to their places in `payload`."""
    for copy in table.window(start, stop).copies:
        copy_strided(payload, copy.stream.moved(-start), packed, copy.packed)
