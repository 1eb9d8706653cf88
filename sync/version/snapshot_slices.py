"""Snapshot slices: the places of the elements that a rank sends, both in its snapshot and in the stream."""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .box import Box, cut, row_major_strides
from .strided_copy import StridedCopy, StridedRows
from .tensor_spec import Shard, TensorSlice


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
