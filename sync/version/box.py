"""Boxes: the slices of tensors in which trainer ranks say what they hold and rollout ranks what they need."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightlane.ckpt_engines import ProtocolError


@dataclass(frozen=True, slots=True)
class Box:
    """The elements of a tensor whose index in every dimension lies in ``starts[d] .. starts[d] + shape[d]``.

    The box of a scalar has no dimensions and one element.

    >>> rows = Box((2, 0), (4, 8))
    >>> rows.intersect(Box((0, 4), (3, 4)))
    Box(starts=(2, 4), shape=(1, 4))
    """

    starts: tuple[int, ...]
    """First index, by dimension."""
    shape: tuple[int, ...]
    """Number of indices, by dimension."""

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """All of a tensor of `shape`."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last index, by dimension."""
        return tuple(start + size for start, size in zip(self.starts, self.shape, strict=True))

    @property
    def index(self) -> tuple[slice, ...]:
        """What a tensor is indexed with to get it."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.shape, strict=True))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of `shape` has all of it."""
        return len(shape) == len(self.starts) and all(
            0 <= start <= stop <= size for start, stop, size in zip(self.starts, self.stops, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The elements of both; None when there are none."""
        starts = tuple(map(max, self.starts, other.starts))
        shape = tuple(min(a, b) - start for a, b, start in zip(self.stops, other.stops, starts, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    def minus(self, other: Box) -> list[Box]:
        """What is left of it without `other`, in boxes that do not overlap."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        left: list[Box] = []
        starts, shape = list(self.starts), list(self.shape)
        for axis, (low, size) in enumerate(zip(common.starts, common.shape, strict=True)):
            high, stop = low + size, starts[axis] + shape[axis]
            for first, last in ((starts[axis], low), (high, stop)):
                if first < last:
                    left.append(
                        Box(
                            (*starts[:axis], first, *starts[axis + 1 :]),
                            (*shape[:axis], last - first, *shape[axis + 1 :]),
                        )
                    )
            starts[axis], shape[axis] = low, size
        return left

    def within(self, outer: Box) -> Box:
        """The same elements, counted from the first index of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.starts, outer.starts, strict=True)), self.shape)

    def inside(self, outer: Box) -> Box:
        """The same elements, if this was counted from the first index of `outer`."""
        return Box(tuple(a + b for a, b in zip(self.starts, outer.starts, strict=True)), self.shape)

    def rows(self, shape: tuple[int, ...]) -> tuple[int, int, int, int] | None:
        """Its elements in a row-major tensor of `shape`, as equal runs at equal distances.

        Returns the first element, the length of a run, the number of runs and the distance of their first elements; None when
        they are no such runs.
        """
        strides = row_major_strides(shape)
        first = sum(start * stride for start, stride in zip(self.starts, strides, strict=True))
        axis, run = len(shape), 1
        while axis and self.shape[axis - 1] == shape[axis - 1]:  # whole from here on: contiguous
            axis -= 1
            run *= shape[axis]
        if axis:
            axis -= 1
            run *= self.shape[axis]
        count, step = 1, run
        while axis and self.shape[axis - 1] == 1:
            axis -= 1
        if axis:  # one dimension of runs, and what is whole inside it joins
            axis -= 1
            count, step = self.shape[axis], strides[axis]
            while axis and step * shape[axis] == strides[axis - 1] and self.shape[axis] == shape[axis]:
                axis -= 1
                count *= self.shape[axis]
            if math.prod(self.shape[:axis]) != 1:
                return None
        return first, run, count, step

    def runs(self, shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[int, int]]:
        """Where its elements from number `first` to before number `last` are in a row-major tensor of `shape`.

        Yields the first position and the length of each contiguous run, in the order of the elements.
        """
        rows = self.rows(shape)
        if rows is None:
            axis = next(axis for axis, size in enumerate(self.shape) if size > 1)
            inner = self.numel // self.shape[axis]
            for index in range(first // inner, -(-last // inner)):
                starts = (*self.starts[:axis], self.starts[axis] + index, *self.starts[axis + 1 :])
                part = Box(starts, (*self.shape[:axis], 1, *self.shape[axis + 1 :]))
                yield from part.runs(shape, max(first - index * inner, 0), min(last - index * inner, inner))
            return
        start, run, _, step = rows
        while first < last:
            row, offset = divmod(first, run)
            length = min(run - offset, last - first)
            yield start + row * step + offset, length
            first += length

    def to_plain(self) -> list[list[int]]:
        """As JSON: ``[starts, shape]``."""
        return [list(self.starts), list(self.shape)]

    @classmethod
    def from_plain(cls, plain: Any) -> Box:
        """Parse what a peer sent; `ProtocolError` for anything else."""
        if (
            isinstance(plain, list)
            and len(plain) == 2  # noqa: PLR2004 - starts and shape
            and all(isinstance(part, list) and len(part) == len(plain[0]) for part in plain)
            and all(type(number) is int and 0 <= number < 2**63 for part in plain for number in part)
        ):
            return cls(tuple(plain[0]), tuple(plain[1]))
        raise ProtocolError(f"not a box: {plain!r}.", part="placement")


def boxes_of_run(shape: tuple[int, ...], start: int, numel: int) -> Iterator[Box]:
    """The run of `numel` elements from element `start` of a row-major flattened tensor of `shape`, as few boxes, in order."""
    if not shape:
        if numel:
            yield Box((), ())
        return
    inner = math.prod(shape[1:])
    stop = start + numel
    while start < stop:
        row, offset = divmod(start, inner)
        if offset == 0 and stop - start >= inner:
            count = (stop - start) // inner
            yield Box((row, *(0 for _ in shape[1:])), (count, *shape[1:]))
            start += count * inner
            continue
        length = min(inner - offset, stop - start)
        for box in boxes_of_run(shape[1:], offset, length):
            yield Box((row, *box.starts), (1, *box.shape))
        start += length


def overlap(boxes: Sequence[Box]) -> bool:
    """Whether two of `boxes` of one tensor have an element in common."""
    ordered = sorted((box for box in boxes if box.numel), key=lambda box: box.starts)
    if ordered and not ordered[0].starts:
        return len(ordered) > 1
    open_boxes: list[Box] = []
    for box in ordered:
        open_boxes = [other for other in open_boxes if other.stops[0] > box.starts[0]]
        if any(other.intersect(box) for other in open_boxes):
            return True
        open_boxes.append(box)
    return False


def cut(box: Box, most: int) -> Iterator[Box]:
    """`box` in pieces of at most `most` elements, in the order of its elements: whole rows as long as a row is not too large."""
    if box.numel <= most:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.shape) if size > 1)
    per = max(1, most // math.prod(box.shape[axis + 1 :]))
    for first in range(0, box.shape[axis], per):
        starts = (*box.starts[:axis], box.starts[axis] + first, *box.starts[axis + 1 :])
        shape = (*box.shape[:axis], min(per, box.shape[axis] - first), *box.shape[axis + 1 :])
        yield from cut(Box(starts, shape), most)


def positions_in(shape: tuple[int, ...], box: Box, positions: torch.Tensor) -> torch.Tensor:
    """Where elements of a slice are in its tensor.

    Args:
        shape: Of the tensor.
        box: The slice.
        positions: int64, ascending, in the row-major flattened slice.

    Returns:
        As many positions in the row-major flattened tensor, ascending, too.
    """
    strides, rest = row_major_strides(shape), positions
    rows = box.rows(shape)
    if rows is not None:
        first, run, count, step = rows
        return positions + first if count == 1 else positions + first + (step - run) * (positions // run)
    found = torch.zeros_like(positions)
    for start, inner, stride in zip(box.starts, row_major_strides(box.shape), strides, strict=True):
        found += (rest // inner + start) * stride
        rest = rest % inner
    return found


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements from one index to the next, by dimension, in a contiguous tensor of `shape`."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


Labels = tuple[int, ...]
_Piece = tuple[tuple[int, ...], tuple[int, ...], Labels]
"""First indices and sizes from some axis on, and whose elements these are."""


def overlay(boxes: Iterable[tuple[Box, int]], shape: tuple[int, ...]) -> list[tuple[Box, Labels]]:
    """Cut a tensor of `shape` into cells, in none of which a box ends.

    Args:
        boxes: Each with a label, such as the number of the rank that it belongs to; a label may have several.
        shape: Of the tensor that all boxes fit.

    Returns:
        Cells that hold every element once, in the order of their first indices, each with the sorted labels of the boxes that it
        lies in: no labels for what no box has. Cells with equal labels are joined where they form a box.
    """
    if not all(shape):
        return []
    labels: dict[Box, list[int]] = {}
    for box, label in boxes:
        found = labels.setdefault(box, [])
        if not found or found[-1] != label:
            found.append(label)
    distinct = list(labels)
    if len(distinct) == 1 and distinct[0].shape == shape:
        return [(distinct[0], _sorted(labels[distinct[0]]))]
    pieces = _Sweep(distinct, list(labels.values()), shape).pieces(tuple(range(len(distinct))), 0)
    together: dict[Labels, list[Box]] = {}
    for starts, sizes, whose in pieces:
        together.setdefault(whose, []).append(Box(starts, sizes))
    if len(together) == len(pieces):  # no two have the same labels
        return [(Box(starts, sizes), whose) for starts, sizes, whose in pieces]
    joined = [(box, whose) for whose, parts in together.items() for box in merge(parts)]
    return sorted(joined, key=lambda cell: cell[0].starts)


def merge(boxes: Sequence[Box]) -> list[Box]:
    """Boxes that do not overlap, joined where two that adjoin form a box, in the order of their first indices."""
    merged = list(boxes)
    for axis in range(len(merged[0].shape) - 1, -1, -1) if len(merged) > 1 else ():
        beside: dict[tuple[tuple[int, ...], ...], list[Box]] = {}
        for box in merged:
            starts, shape = box.starts, box.shape
            other = (starts[:axis], starts[axis + 1 :], shape[:axis], shape[axis + 1 :])
            beside.setdefault(other, []).append(box)
        if len(beside) < len(merged):
            merged = [joined for row in beside.values() for joined in _join(row, axis)]
    return sorted(merged, key=lambda box: box.starts)


def _join(row: list[Box], axis: int) -> list[Box]:
    row.sort(key=lambda box: box.starts[axis])
    joined = row[:1]
    for box in row[1:]:
        last = joined[-1]
        if last.starts[axis] + last.shape[axis] == box.starts[axis]:
            size = last.shape[axis] + box.shape[axis]
            joined[-1] = Box(last.starts, (*last.shape[:axis], size, *last.shape[axis + 1 :]))
        else:
            joined.append(box)
    return joined


class _Sweep:
    """Goes along one axis after the other, and remembers what it found for a set of boxes from an axis on."""

    def __init__(self, boxes: list[Box], labels: list[list[int]], shape: tuple[int, ...]) -> None:
        self._boxes = boxes
        self._labels = labels
        self._shape = shape
        self._found: dict[tuple[tuple[int, ...], int], list[_Piece]] = {}

    def pieces(self, among: tuple[int, ...], axis: int) -> list[_Piece]:
        """The elements from `axis` on, of which all axes before lie in the boxes `among` and in no other."""
        found = self._found.get((among, axis))
        if found is None:
            found = self._found[among, axis] = self._sweep(among, axis)
        return found

    def _sweep(self, among: tuple[int, ...], axis: int) -> list[_Piece]:
        if axis == len(self._shape):
            if len(among) == 1:
                return [((), (), _sorted(self._labels[among[0]]))]
            return [((), (), tuple(sorted({label for index in among for label in self._labels[index]})))]
        if not among:
            return [((0,) * (len(self._shape) - axis), self._shape[axis:], ())]
        begin: dict[int, list[int]] = {}
        end: dict[int, list[int]] = {}
        for index in among:
            box = self._boxes[index]
            start = box.starts[axis]
            begin.setdefault(start, []).append(index)
            end.setdefault(start + box.shape[axis], []).append(index)
        cuts = sorted({0, self._shape[axis], *begin, *end})
        active: set[int] = set()
        pieces: list[_Piece] = []
        for first, last in itertools.pairwise(cuts):
            active.difference_update(end.get(first, ()))
            active.update(begin.get(first, ()))
            inner = among if len(active) == len(among) else tuple(sorted(active))
            pieces += [
                ((first, *starts), (last - first, *sizes), whose)
                for starts, sizes, whose in self.pieces(inner, axis + 1)
            ]
        return pieces


def _sorted(labels: list[int]) -> Labels:
    return tuple(sorted(set(labels))) if len(labels) > 1 else tuple(labels)
