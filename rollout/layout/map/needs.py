"""The boxes of each checkpoint tensor that one rank needs: first index and size in every dimension.

A layout's copies are strided blocks over flat tensors with joined dimensions. This module splits them again along the dimensions
of the tensor, so that a sender can cut exactly these boxes out of its shards.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping

from weightlane.sync import Placement, TensorSpec
from weightlane.sync.version.box import Box, overlay

from .geometry import Block, blocks_read, elements_of
from .layout_map import LayoutMap, SourceSpec
from .sliced_layout import steps_of

_Range = tuple[int, int]
"""First index, and one past the last."""

_MOST_RANGES = 16
"""Most separate ranges of one copy in one dimension, so that a slice list stays short; more become one range with gaps."""


def needed_boxes(layout: LayoutMap) -> dict[str, list[Box]]:
    """The parts of checkpoint tensors that a rank with this layout reads.

    The boxes are exact for ranges of rows, columns, heads and experts, for several ranges in one tensor, and for interleaved
    tensors that one rank reads completely. A copy with more than a few gaps gets boxes that contain the gaps, and a tensor of
    which a copy does not follow the dimensions, such as one that begins within a row and ends in another, is needed whole.

    Returns:
        Disjoint boxes in ascending order for every tensor of ``layout.sources``. Every element that a copy reads is in one box,
        and so is every element of `uncopied_sources`. A tensor that is not read has no boxes.
    """
    blocks = blocks_read(layout.copies)
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
    if 0 in shape:
        return []
    found: list[Box] = []
    for offset, strides, lengths in blocks:
        if 0 in lengths:
            continue
        followed = steps_of(offset, zip(lengths, strides, strides, strict=True), shape)
        if followed is None:
            return [Box.whole(shape)]
        first, steps = followed
        ranges = [
            _indices(at, [(step.stride, step.length) for step in steps if step.axis == axis])
            for axis, at in enumerate(first)
        ]
        found += [
            Box(tuple(low for low, _ in chosen), tuple(high - low for low, high in chosen))
            for chosen in itertools.product(*ranges)
        ]
    return [box for box, labels in overlay(((box, 0) for box in found), shape) if labels] if found else []


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
