"""The boxes of each checkpoint tensor that one rank needs: first index and size in every dimension.

A layout's copies are strided blocks over flat tensors with joined dimensions. This module splits them again along the dimensions
of the tensor, so that a sender can cut exactly these boxes out of its shards.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from weightlane.sync import Placement, TensorSpec
from weightlane.sync.version.box import Box

from .geometry import Block, elements_of, source_block
from .layout_map import LayoutMap, SourceSpec

_Steps = tuple[tuple[int, int], ...]
"""Stride and length of the dimensions of a block, the largest stride first."""
_Range = tuple[int, int]
"""First index, and one past the last."""
_Ranges = tuple[_Range, ...]
"""One range per dimension."""

_MOST_RANGES = 16
"""Most separate ranges of one copy in one dimension, so that a slice list stays short; more become one range with gaps."""


def needed_boxes(layout: LayoutMap) -> dict[str, list[Box]]:
    """The parts of checkpoint tensors that a rank with this layout reads.

    The boxes are exact for ranges of rows, columns, heads and experts, for several ranges in one tensor, and for interleaved
    tensors that one rank reads completely. A copy with more than a few gaps gets boxes that contain the gaps.

    Returns:
        Disjoint boxes in ascending order for every tensor of ``layout.sources``. Every element that a copy reads is in one box,
        and so is every element of `uncopied_sources`. A tensor that is not read has no boxes.
    """
    blocks: dict[str, set[Block]] = defaultdict(set)
    for copy in layout.copies:
        blocks[copy.source].add(source_block(copy))
    complete = layout.uncopied_sources
    # Layers are alike, and so are experts: most tensors are cut like one before.
    known: dict[tuple[tuple[int, ...], frozenset[Block]], list[Box]] = {}
    result: dict[str, list[Box]] = {}
    for name, spec in layout.sources.items():
        key = spec.shape, frozenset([elements_of(spec.shape)] if name in complete else blocks.get(name, ()))
        if (boxes := known.get(key)) is None:
            boxes = known[key] = _boxes(*key)
        result[name] = list(boxes)
    return result


def needed_placement(boxes: Mapping[str, list[Box]], sent: Mapping[str, SourceSpec]) -> Placement:
    """The slices of `sent`, the tensors of a version, that a rank needs: its `boxes`, and tensors without boxes completely."""
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
    """Boxes, as one range per dimension, that together contain the block with `offset` and `steps`.

    `strides` are the row-major strides of a tensor, or of its inner dimensions.
    """
    if not strides:
        yield ()
        return
    unit = strides[0]
    outer = tuple(step for step in steps if step[0] >= unit)
    inner = steps[len(outer) :]
    first, rest = divmod(offset, unit)
    if any(stride % unit for stride, _ in outer):
        for start, fewer in _split_outer(offset, outer, inner):
            yield from _ranges(strides, start, fewer)
    elif rest + _reach(inner) < unit:
        indices = _indices(first, [(stride // unit, length) for stride, length in outer])
        for box in _ranges(strides[1:], rest, inner):
            for low_high in indices:
                yield (low_high, *box)
    else:
        for start, more in _split_rows(unit, offset, outer, inner):
            yield from _ranges(strides, start, more)


def _split_outer(offset: int, outer: _Steps, inner: _Steps) -> Iterator[tuple[int, _Steps]]:
    """Blocks without the steps `outer`, which fit no dimension of the tensor; one block without gaps if there were too many."""
    if math.prod(length for _, length in outer) > _MOST_RANGES:
        yield offset, ((1, _reach((*outer, *inner)) + 1),)
        return
    for index in itertools.product(*(range(length) for _, length in outer)):
        yield offset + sum(at * stride for at, (stride, _) in zip(index, outer, strict=True)), inner


def _split_rows(unit: int, offset: int, outer: _Steps, inner: _Steps) -> Iterator[tuple[int, _Steps]]:
    """The parts of a block before its first whole row of `unit` elements, the whole rows, and the part after the last row."""
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
    """Distance from a block's offset to its last element."""
    return sum(stride * (length - 1) for stride, length in steps)


def _indices(first: int, steps: Iterable[tuple[int, int]]) -> list[_Range]:
    """The indices ``first + sum(at * step)`` as disjoint ascending ranges; gaps are filled if there are too many ranges."""
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
    """Disjoint ascending ranges that contain the same indices."""
    result: list[_Range] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1]:
            result[-1] = result[-1][0], max(high, result[-1][1])
        else:
            result.append((low, high))
    return result


def _disjoint(boxes: Sequence[_Ranges], dim: int) -> list[_Ranges]:
    """Disjoint boxes that contain the same elements, ascending: one slab after the other along `dim`, equal neighbours joined.

    Ranges of dimensions before `dim` are ignored.
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
