"""Boxes laid over one another: which elements lie in which of them."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from ..boxes import Box

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
