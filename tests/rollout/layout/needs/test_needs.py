"""The boxes that a rank asks for contain every element that it reads, none twice, and nothing else where that can be."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightlane.rollout.layout.map.layout_map import LayoutCopy, LayoutMap, Refusal, SourceSpec
from weightlane.rollout.layout.map.needs import needed_boxes
from weightlane.sync.version.box import Box

Block = tuple[int, tuple[int, ...], tuple[int, ...]]


def layout_of(shape: Sequence[int], blocks: Sequence[Block]) -> LayoutMap:
    """A layout whose copies read `blocks` of the tensor ``a``."""
    copies = [LayoutCopy("a", offset, strides, "w", 0, strides, lengths) for offset, strides, lengths in blocks]
    return LayoutMap({"a": SourceSpec(tuple(shape), torch.bfloat16)}, {}, copies)


def read(blocks: Sequence[Block]) -> set[int]:
    """The elements, one by one."""
    return {
        offset + sum(at * stride for at, stride in zip(index, strides, strict=True))
        for offset, strides, lengths in blocks
        for index in itertools.product(*map(range, lengths))
    }


def held(shape: Sequence[int], boxes: Sequence[Box]) -> set[int]:
    """The elements of `boxes`, of which none may be in two."""
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    found: list[int] = []
    for box in boxes:
        assert box.fits(tuple(shape))
        assert box.numel
        ranges = [range(start, stop) for start, stop in zip(box.starts, box.stops, strict=True)]
        found += [
            sum(at * stride for at, stride in zip(index, strides, strict=True)) for index in itertools.product(*ranges)
        ]
    assert len(found) == len(set(found))
    return set(found)


@st.composite
def tensors_and_blocks(draw: st.DrawFn) -> tuple[list[int], list[Block]]:
    """Any strided blocks at all, also such as no view of the tensor has."""
    shape = draw(st.lists(st.integers(1, 6), max_size=4))
    count = math.prod(shape)
    blocks: list[Block] = []
    for _ in range(draw(st.integers(1, 4))):
        steps = draw(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 5)), max_size=3))
        while sum(stride * (length - 1) for stride, length in steps) >= count:
            steps.pop()
        reach = sum(stride * (length - 1) for stride, length in steps)
        offset = draw(st.integers(0, count - 1 - reach))
        blocks.append((offset, tuple(stride for stride, _ in steps), tuple(length for _, length in steps)))
    return shape, blocks


@given(tensors_and_blocks())
def test_no_element_that_is_read_is_lost_and_none_is_in_two_boxes(case: tuple[list[int], list[Block]]) -> None:
    shape, blocks = case
    assert read(blocks) <= held(shape, needed_boxes(layout_of(shape, blocks))["a"])


@st.composite
def tensors_and_windows(draw: st.DrawFn) -> tuple[list[int], list[Block]]:
    """Boxes of a tensor as a loader's views give them: neighbouring dimensions joined where they go on."""
    shape = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    blocks: list[Block] = []
    for _ in range(draw(st.integers(1, 4))):
        starts = [draw(st.integers(0, length - 1)) for length in shape]
        lengths = [draw(st.integers(1, length - start)) for length, start in zip(shape, starts, strict=True)]
        offset = sum(start * stride for start, stride in zip(starts, strides, strict=True))
        steps: list[tuple[int, int]] = []
        for stride, length in zip(strides, lengths, strict=True):
            if steps and steps[-1][0] == stride * length:
                steps[-1] = stride, steps[-1][1] * length
            elif length > 1:
                steps.append((stride, length))
        order = draw(st.permutations(steps))
        blocks.append((offset, tuple(stride for stride, _ in order), tuple(length for _, length in order)))
    return shape, blocks


@given(tensors_and_windows())
def test_what_views_of_a_tensor_read_is_in_boxes_that_hold_nothing_else(case: tuple[list[int], list[Block]]) -> None:
    shape, blocks = case
    assert read(blocks) == held(shape, needed_boxes(layout_of(shape, blocks))["a"])


@pytest.mark.parametrize(
    ("shape", "blocks", "boxes"),
    [
        ((6, 8), [(18, (1,), (24,))], [((0, 0), (6, 8))]),  # beginning in a row
        ((6, 8), [(18, (8, 1), (3, 6))], [((2, 2), (3, 6))]),  # some columns of some rows
        ((8, 6, 4), [(8, (24, 1), (8, 4))], [((0, 2, 0), (8, 1, 4))]),  # a row of each expert
        ((64, 2), [(0, (4, 1), (16, 2))], [((row, 0), (1, 2)) for row in range(0, 32, 2)]),  # a few gaps
        ((128, 2), [(at, (4, 1), (64, 2)) for at in (0, 2)], [((0, 0), (128, 2))]),  # interleaved, and all of it read
        ((128, 2), [(0, (4, 1), (64, 2))], [((0, 0), (127, 2))]),  # as above, and only half is read
        ((6, 8), [(0, (1,), (24,)), (16, (1,), (32,))], [((0, 0), (6, 8))]),  # overlapping
        ((6, 8), [], []),
        ((0, 8), [(0, (1,), (0,))], []),
    ],
)
def test_boxes_are_as_few_and_as_tight_as_what_is_read_allows(
    shape: tuple[int, ...], blocks: list[Block], boxes: list[Any]
) -> None:
    assert needed_boxes(layout_of(shape, blocks))["a"] == [Box(*box) for box in boxes]


def test_what_something_is_computed_from_is_needed_whole() -> None:
    layout = layout_of((6, 8), [(0, (1,), (8,))])
    assert needed_boxes(layout)["a"] == [Box((0, 0), (1, 8))]
    layout.feeds.append(("a", "w"))
    assert needed_boxes(layout)["a"] == [Box.whole((6, 8))]
    refused = layout_of((6, 8), [])
    refused.refused_sources.append(Refusal("a", "its values are looked at"))
    assert needed_boxes(refused)["a"] == [Box.whole((6, 8))]
