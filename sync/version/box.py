"""Boxes: the rectangular slices of tensors that trainer ranks hold and rollout ranks need."""

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
    """A rectangular slice of a tensor: in dimension ``d`` the indices ``range(starts[d], starts[d] + shape[d])``.

    The box of a scalar has no dimensions and one element.

    >>> rows = Box((2, 0), (4, 8))
    >>> rows.intersect(Box((0, 4), (3, 4)))
    Box(starts=(2, 4), shape=(1, 4))
    """

    starts: tuple[int, ...]
    """First index in every dimension."""
    shape: tuple[int, ...]
    """Size in every dimension."""

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box of all elements of a tensor of `shape`."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def stops(self) -> tuple[int, ...]:
        """One past the last index in every dimension."""
        return tuple(start + size for start, size in zip(self.starts, self.shape, strict=True))

    @property
    def index(self) -> tuple[slice, ...]:
        """The index that selects the box from a tensor: ``tensor[box.index]``."""
        return tuple(slice(start, start + size) for start, size in zip(self.starts, self.shape, strict=True))

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether the box lies inside a tensor of `shape`."""
        return len(shape) == len(self.starts) and all(
            0 <= start <= stop <= size for start, stop, size in zip(self.starts, self.stops, shape, strict=True)
        )

    def intersect(self, other: Box) -> Box | None:
        """The common elements of two boxes; None when there are none."""
        starts = tuple(map(max, self.starts, other.starts))
        shape = tuple(min(a, b) - start for a, b, start in zip(self.stops, other.stops, starts, strict=True))
        return Box(starts, shape) if all(size > 0 for size in shape) else None

    def with_axis(self, axis: int, start: int, size: int) -> Box:
        """The box with this first index and size in dimension `axis`."""
        return Box(
            (*self.starts[:axis], start, *self.starts[axis + 1 :]), (*self.shape[:axis], size, *self.shape[axis + 1 :])
        )

    def minus(self, other: Box) -> list[Box]:
        """The elements that are not in `other`, as boxes that do not overlap."""
        common = self.intersect(other)
        if common is None:
            return [self] if self.numel else []
        left: list[Box] = []
        rest = self
        for axis, (low, size) in enumerate(zip(common.starts, common.shape, strict=True)):
            for first, last in ((rest.starts[axis], low), (low + size, rest.stops[axis])):
                if first < last:
                    left.append(rest.with_axis(axis, first, last - first))
            rest = rest.with_axis(axis, low, size)
        return left

    def within(self, outer: Box) -> Box:
        """The box with its indices counted from the first index of `outer`."""
        return Box(tuple(a - b for a, b in zip(self.starts, outer.starts, strict=True)), self.shape)

    def moved_into(self, outer: Box) -> Box:
        """The inverse of `within`."""
        return Box(tuple(a + b for a, b in zip(self.starts, outer.starts, strict=True)), self.shape)

    def run(self, shape: tuple[int, ...]) -> tuple[int, int] | None:
        """First element and number of elements of the box in a row-major tensor of `shape`; None if they are not contiguous."""
        axis = next((axis for axis, size in enumerate(self.shape) if size > 1), len(shape))
        if self.shape[axis + 1 :] != shape[axis + 1 :]:
            return None
        strides = row_major_strides(shape)
        return sum(start * stride for start, stride in zip(self.starts, strides, strict=True)), self.numel

    def runs(self, shape: tuple[int, ...], first: int, last: int) -> Iterator[tuple[int, int]]:
        """Find elements [`first`, `last`) of the box, counted in row-major order, in a row-major tensor of `shape`.

        Yields the first position and the length of each contiguous run, in the order of the elements.
        """
        run = self.run(shape)
        if run is not None:
            if first < last:
                yield run[0] + first, last - first
            return
        axis = next(axis for axis, size in enumerate(self.shape) if size > 1)
        inner = self.numel // self.shape[axis]
        for index in range(first // inner, -(-last // inner)):
            part = self.with_axis(axis, self.starts[axis] + index, 1)
            yield from part.runs(shape, max(first - index * inner, 0), min(last - index * inner, inner))

    def to_plain(self) -> list[list[int]]:
        """The box as JSON: ``[starts, shape]``."""
        return [list(self.starts), list(self.shape)]

    @classmethod
    def from_plain(cls, plain: Any) -> Box:
        """Parse a peer's message; raises `ProtocolError` for anything that is no box."""
        if (
            isinstance(plain, list)
            and len(plain) == 2  # noqa: PLR2004 - starts and shape
            and all(isinstance(part, list) and len(part) == len(plain[0]) for part in plain)
            and all(type(number) is int and 0 <= number < 2**63 for part in plain for number in part)
        ):
            return cls(tuple(plain[0]), tuple(plain[1]))
        raise ProtocolError(f"not a box: {plain!r}.", part="placement")


def boxes_of_run(shape: tuple[int, ...], start: int, numel: int) -> Iterator[Box]:
    """Divide `numel` elements from element `start` on of a row-major tensor of `shape` into a few boxes, in order."""
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
    """Whether two of `boxes` have an element in common."""
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
    """Cut `box` into boxes of at most `most` elements, in the order of its elements. Rows are cut only if they are longer."""
    if box.numel <= most:
        yield box
        return
    axis = next(axis for axis, size in enumerate(box.shape) if size > 1)
    per = max(1, most // math.prod(box.shape[axis + 1 :]))
    for first in range(0, box.shape[axis], per):
        part = box.with_axis(axis, box.starts[axis] + first, min(per, box.shape[axis] - first))
        yield from cut(part, most)


def positions_in(shape: tuple[int, ...], box: Box, positions: torch.Tensor) -> torch.Tensor:
    """Translate positions in a slice to positions in its tensor.

    Args:
        shape: Shape of the tensor.
        box: The slice.
        positions: int64, ascending, in the row-major flattened slice.

    Returns:
        int64, ascending, in the row-major flattened tensor.
    """
    if (run := box.run(shape)) is not None:
        return positions + run[0]
    found, rest = torch.zeros_like(positions), positions
    for start, inner, stride in zip(box.starts, row_major_strides(box.shape), row_major_strides(shape), strict=True):
        found += (rest // inner + start) * stride
        rest = rest % inner
    return found


def row_major_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of `shape`, in elements."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


Labels = tuple[int, ...]
_Cell = tuple[tuple[int, ...], tuple[int, ...], Labels]
"""First indices and sizes of a cell from some axis on, and its labels."""


def overlay(boxes: Iterable[tuple[Box, int]], shape: tuple[int, ...]) -> list[tuple[Box, Labels]]:
    """Cut a tensor of `shape` into cells, so that all elements of a cell are in the same boxes.

    Args:
        boxes: Boxes of the tensor, each with a label such as the index of its rank. Several boxes may have one label.
        shape: Shape of the tensor.

    Returns:
        Cells that hold every element once, in the order of their first indices, each with the sorted labels of its boxes. A cell
        in no box has no labels. Adjacent cells with equal labels are merged if they form a box.
    """
    if not all(shape):
        return []
    labels: dict[Box, list[int]] = {}
    for box, label in boxes:
        of_box = labels.setdefault(box, [])
        if not of_box or of_box[-1] != label:
            of_box.append(label)
    distinct = list(labels)
    if len(distinct) == 1 and distinct[0].shape == shape:
        return [(distinct[0], _sorted(labels[distinct[0]]))]
    cells = _Sweep(distinct, list(labels.values()), shape).cells(tuple(range(len(distinct))), 0)
    by_labels: dict[Labels, list[Box]] = {}
    for starts, sizes, found in cells:
        by_labels.setdefault(found, []).append(Box(starts, sizes))
    if len(by_labels) == len(cells):
        return [(Box(starts, sizes), found) for starts, sizes, found in cells]
    merged = [(box, found) for found, parts in by_labels.items() for box in merge(parts)]
    return sorted(merged, key=lambda cell: cell[0].starts)


def merge(boxes: Sequence[Box]) -> list[Box]:
    """Merge adjacent boxes that together form a box. `boxes` must not overlap; the result is sorted by first indices."""
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
            joined[-1] = last.with_axis(axis, last.starts[axis], last.shape[axis] + box.shape[axis])
        else:
            joined.append(box)
    return joined


class _Sweep:
    """Sweeps along one axis after the other. Caches the cells found for each set of boxes and first axis."""

    def __init__(self, boxes: list[Box], labels: list[list[int]], shape: tuple[int, ...]) -> None:
        self._boxes = boxes
        self._labels = labels
        self._shape = shape
        self._found: dict[tuple[tuple[int, ...], int], list[_Cell]] = {}

    def cells(self, among: tuple[int, ...], axis: int) -> list[_Cell]:
        """The cells in the dimensions from `axis` on, where the dimensions before lie in exactly the boxes `among`."""
        found = self._found.get((among, axis))
        if found is None:
            found = self._found[among, axis] = self._sweep(among, axis)
        return found

    def _sweep(self, among: tuple[int, ...], axis: int) -> list[_Cell]:
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
        cells: list[_Cell] = []
        for first, last in itertools.pairwise(cuts):
            active.difference_update(end.get(first, ()))
            active.update(begin.get(first, ()))
            inner = among if len(active) == len(among) else tuple(sorted(active))
            cells += [
                ((first, *starts), (last - first, *sizes), labels)
                for starts, sizes, labels in self.cells(inner, axis + 1)
            ]
        return cells


def _sorted(labels: list[int]) -> Labels:
    return tuple(sorted(set(labels))) if len(labels) > 1 else tuple(labels)
