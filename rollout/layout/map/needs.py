"""What one rank needs of each checkpoint tensor, as boxes: where it begins in every dimension, and how far it goes.

A layout's slices are strided blocks over flat tensors, their dimensions joined wherever a copy can go on. Here they are taken
apart again along the dimensions of the tensor, so that a sender may cut exactly that out of whatever shards it has.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from weightlane.sync import Placement, TensorSpec
from weightlane.sync.version.box import Box

from .geometry import Block, elements_of
from .layout_map import LayoutMap, SourceSpec

_Steps = tuple[tuple[int, int], ...]
"""Stride and length of the dimensions of a block, the largest stride first."""
_Range = tuple[int, int]
"""First index, and the one behind the last."""
_Ranges = tuple[_Range, ...]
"""A range of each dimension."""

_MOST_RANGES = 16
"""Separate ranges that one slice may have in one dimension; more are taken for one range, gaps included."""


def needed_boxes(layout: LayoutMap) -> dict[str, list[Box]]:
    """The parts of checkpoint tensors that a rank with this layout reads.

    They are exact for ranges of rows, columns, heads and experts, for several of them in one tensor, and for what is interleaved
    as long as one rank reads all of it. Where a slice steps over more than a few gaps, they contain the gaps.

    Args:
        layout: An accepted layout: what it says of sources is all that the rank reads. In a layout as it was traced, tensors that
            are refused, or from which something is computed, are needed whole.

    Returns:
        For every tensor of ``layout.sources`` disjoint boxes, in ascending order. Every element that a slice reads is in one
        of them. A tensor of which nothing is read has none.
    """
    blocks: dict[str, set[Block]] = defaultdict(set)
    for piece in layout.slices:
        blocks[piece.source].add((piece.source_offset, piece.source_strides, piece.shape))
    whole = {refusal.tensor for refusal in layout.refused_sources} | {source for source, _ in layout.feeds}
    # Layers are alike, and so are experts: most tensors are cut like one before.
    known: dict[tuple[tuple[int, ...], frozenset[Block]], list[Box]] = {}
    result: dict[str, list[Box]] = {}
    for name, spec in layout.sources.items():
        key = spec.shape, frozenset([elements_of(spec.shape)] if name in whole else blocks.get(name, ()))
        if (boxes := known.get(key)) is None:
            boxes = known[key] = _boxes(*key)
        result[name] = list(boxes)
    return result


def needed_placement(boxes: Mapping[str, list[Box]], sent: Mapping[str, SourceSpec]) -> Placement:
    """What a rank has to get of `sent`, the tensors of a version, of which it reads `boxes`; of others everything."""
    return Placement.of_boxes(
        (TensorSpec(name, spec.shape, spec.dtype), boxes[name] if name in boxes else [Box.whole(spec.shape)])
        for name, spec in sent.items()
    )


def _boxes(shape: tuple[int, ...], blocks: Iterable[Block]) -> list[Box]:
    """Disjoint boxes around `blocks` of a tensor of `shape`."""
    _, strides, _ = elements_of(shape)
    found: dict[_Ranges, None] = {}
    for offset, steps, lengths in blocks:
        if 0 not in lengths and 0 not in shape:
            ordered = tuple(
                sorted((item for item in zip(steps, lengths, strict=True) if item[1] != 1 and item[0]), reverse=True)
            )
            found |= dict.fromkeys(_ranges(strides, offset, ordered))
    return [
        Box(tuple(low for low, _ in ranges), tuple(high - low for low, high in ranges))
        for ranges in _disjoint(list(found), 0)
    ]


def _ranges(strides: Sequence[int], offset: int, steps: _Steps) -> Iterator[_Ranges]:
    """A range of each dimension, in products that together contain a block.

    Args:
        strides: Row-major strides of a tensor, or of its inner dimensions while the outer ones stand still.
        offset: Of the block in it.
        steps: Of the block.
    """
    if not strides:
        yield ()
        return
    unit = strides[0]
    outer = tuple(step for step in steps if step[0] >= unit)
    inner = steps[len(outer) :]
    first, rest = divmod(offset, unit)
    if any(stride % unit for stride, _ in outer):
        for start, fewer in _taken_apart(offset, outer, inner):
            yield from _ranges(strides, start, fewer)
    elif rest + _reach(inner) < unit:
        indices = _indices(first, [(stride // unit, length) for stride, length in outer])
        for box in _ranges(strides[1:], rest, inner):
            for low_high in indices:
                yield (low_high, *box)
    else:
        for start, more in _cut_at_rows(unit, offset, outer, inner):
            yield from _ranges(strides, start, more)


def _taken_apart(offset: int, outer: _Steps, inner: _Steps) -> Iterator[tuple[int, _Steps]]:
    """Blocks without the steps `outer`, which are none of the tensor's; one without gaps where that would be too many."""
    if math.prod(length for _, length in outer) > _MOST_RANGES:
        yield offset, ((1, _reach((*outer, *inner)) + 1),)
        return
    for index in itertools.product(*(range(length) for _, length in outer)):
        yield offset + sum(at * stride for at, (stride, _) in zip(index, outer, strict=True)), inner


def _cut_at_rows(unit: int, offset: int, outer: _Steps, inner: _Steps) -> Iterator[tuple[int, _Steps]]:
    """What of a block comes before its first whole row of `unit` elements, whole rows, and what comes after the last."""
    first, rest = divmod(offset, unit)
    (stride, length), smaller = inner[0], inner[1:]
    at, rest = divmod(rest, stride)
    if unit % stride or rest + _reach(smaller) >= stride:  # its steps do not fit into rows
        at, rest = offset % unit, 0
        stride, length, smaller = 1, _reach(inner) + 1, ()
    each, start = unit // stride, first * unit + rest
    head = min(each - at, length) if at else 0
    rows, tail = divmod(length - head, each)
    if head:
        yield start + at * stride, (*outer, (stride, head), *smaller)
        start += unit
    if rows:
        yield start, (*sorted((*outer, (unit, rows)), reverse=True), (stride, each), *smaller)
    if tail:
        yield start + rows * unit, (*outer, (stride, tail), *smaller)


def _reach(steps: _Steps) -> int:
    """How far from its offset a block goes."""
    return sum(stride * (length - 1) for stride, length in steps)


def _indices(first: int, steps: Iterable[tuple[int, int]]) -> list[_Range]:
    """The indices ``first + sum(at * step)`` as disjoint ascending ranges; gaps are filled where there are too many."""
    ranges = [(first, first + 1)]
    for step, length in sorted(steps):
        low, high = ranges[0][0], ranges[-1][1]
        without_gaps = len(ranges) == 1 and high - low >= step
        if without_gaps or len(ranges) * length > _MOST_RANGES:
            ranges = [(low, high + (length - 1) * step)]
        else:
            ranges = _merged((a + at * step, b + at * step) for at in range(length) for a, b in ranges)
    return ranges


def _merged(ranges: Iterable[_Range]) -> list[_Range]:
    """Disjoint ascending ranges of the same indices."""
    result: list[_Range] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1]:
            result[-1] = result[-1][0], max(high, result[-1][1])
        else:
            result.append((low, high))
    return result


def _disjoint(boxes: Sequence[_Ranges], dim: int) -> list[_Ranges]:
    """Disjoint boxes of the same elements, ascending: slab after slab of dimension `dim`, equal neighbours joined.

    Args:
        boxes: A range of every dimension each; only those from `dim` on are looked at.
        dim: The dimension to begin with.
    """
    if not boxes:
        return []
    if dim == len(boxes[0]):
        return [()]
    if dim == len(boxes[0]) - 1:
        return [(item,) for item in _merged(box[dim] for box in boxes)]
    begins: dict[int, list[_Ranges]] = defaultdict(list)
    for box in boxes:
        begins[box[dim][0]].append(box)
    cuts = sorted({bound for box in boxes for bound in box[dim]})
    known: dict[frozenset[_Ranges], list[_Ranges]] = {}
    slabs: list[tuple[int, int, list[_Ranges]]] = []
    active: list[_Ranges] = []
    for low, high in itertools.pairwise(cuts):
        active = [box for box in active if box[dim][1] > low] + begins[low]
        key = frozenset(box[dim + 1 :] for box in active)
        if (inside := known.get(key)) is None:
            inside = known[key] = _disjoint(list(key), 0)
        if slabs and slabs[-1][1] == low and slabs[-1][2] == inside:
            slabs[-1] = slabs[-1][0], high, inside
        elif inside:
            slabs.append((low, high, inside))
    return [((low, high), *rest) for low, high, inside in slabs for rest in inside]
