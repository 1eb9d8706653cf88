"""Where the slices that a rank sends lie, both in its snapshot and in a stream of whole tensors or of slices of them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .box import Box, cut, row_major_strides
from .strided_copy import StridedCopy, StridedRun
from .tensor_spec import Held, TensorSlice


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Elements that one slice in a snapshot has of one tensor of the stream."""

    number: int
    """Which tensor of the stream."""
    box: Box
    """Which of its elements."""
    whole: tuple[int, ...]
    """Shape of that tensor."""
    place: int
    """First element in the snapshot, counted in elements of `dtype`."""
    strides: tuple[int, ...]
    """From one index to the next there, in elements."""
    dtype: torch.dtype

    def view(self, snapshot: torch.Tensor) -> torch.Tensor:
        """The elements in `snapshot`, 1-D uint8, as a view with the part's shape."""
        flat = snapshot[: snapshot.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return flat.as_strided(self.box.shape, self.strides, flat.storage_offset() + self.place)

    @property
    def end(self) -> int:
        """One past its last byte in the snapshot."""
        last = sum((size - 1) * stride for size, stride in zip(self.box.shape, self.strides, strict=True))
        return (self.place + last + 1) * self.dtype.itemsize

    def cut(self, most: int) -> Iterator[SnapshotPart]:
        """It in parts of at most `most` elements, in the order of the elements."""
        for box in cut(self.box, most):
            steps = zip(box.within(self.box).starts, self.strides, strict=True)
            place = self.place + sum(start * stride for start, stride in steps)
            yield SnapshotPart(self.number, box, self.whole, place, self.strides, self.dtype)

    def pieces(self, offset: int) -> Iterator[StridedCopy]:
        """Its bytes, where the stream has the tensor at byte `offset`."""
        strides = row_major_strides(self.whole)
        first = sum(start * stride for start, stride in zip(self.box.starts, strides, strict=True))
        width = self.dtype.itemsize
        sides = list(zip(self.box.shape, strides, self.strides, strict=True))
        for stream, snapshot, run, count, steps in _paired(first, self.place, sides):
            rows = [
                StridedRun(start * width, step * width, run * width, count)
                for start, step in zip((stream, snapshot), steps, strict=True)
            ]
            yield StridedCopy(rows[0].moved(offset), rows[1])


def parts_of(held: Sequence[Held], places: Sequence[int], regions: Sequence[TensorSlice]) -> list[SnapshotPart]:
    """What the slices `held`, row-major at bytes `places` of a snapshot, have of a stream of `regions`; in the stream's order."""
    having: dict[str, list[tuple[Held, int]]] = defaultdict(list)
    for mine, place in zip(held, places, strict=True):
        if mine.numel:
            having[mine.spec.name].append((mine, place))
    return [
        _part(number, region.box, common, mine, place)
        for number, region in enumerate(regions)
        for mine, place in having.get(region.spec.name, ())
        if (common := region.box.intersect(mine.box)) is not None
    ]


def _part(number: int, region: Box, common: Box, mine: Held, place: int) -> SnapshotPart:
    strides = row_major_strides(mine.box.shape)
    inside = sum(a * b for a, b in zip(common.within(mine.box).starts, strides, strict=True))
    dtype = mine.spec.dtype
    return SnapshotPart(number, common.within(region), region.shape, place // dtype.itemsize + inside, strides, dtype)


def _paired(
    one: int, other: int, sides: Sequence[tuple[int, int, int]]
) -> Iterator[tuple[int, int, int, int, tuple[int, int]]]:
    """Equal rows on two sides that are strided alike: first elements, length, number of rows, and their steps on each side.

    `sides` are size and both strides of each dimension, outermost first.
    """
    left = [side for side in sides if side[0] != 1]
    run = 1
    while left and left[-1][1] == left[-1][2] == run:
        run *= left.pop()[0]
    count, steps = 1, (run, run)
    if left:
        count, *_ = last = left.pop()
        steps = last[1], last[2]
        while left and left[-1][1] == steps[0] * count and left[-1][2] == steps[1] * count:
            count *= left.pop()[0]
    for number in range(math.prod(size for size, *_ in left)):
        first, second, rest = one, other, number
        for size, stride, its in reversed(left):
            rest, at = divmod(rest, size)
            first += at * stride
            second += at * its
        yield first, second, run, count, steps
