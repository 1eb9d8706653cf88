"""Rewrites a layout for a version that is received as slices: the same copies, which read the slices."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from weightlane.sync import TensorSlice
from weightlane.sync.version.box import Box, row_major_strides

from .layout_map import LayoutCopy, LayoutMap, SourceSpec


@dataclass(frozen=True, slots=True)
class Step:
    """One dimension of a copy, as steps along one dimension of its source."""

    axis: int
    stride: int
    """Indices of the source from one step to the next."""
    length: int
    target: int
    """Elements of the target from one step to the next."""


def sliced_layout(layout: LayoutMap, regions: Mapping[str, TensorSlice]) -> LayoutMap:
    """The copies of an accepted `layout` with slices as their sources. `regions` are the slices that are received, by name.

    A tensor stays a source under its own name if a copy of it does not follow its dimensions.
    """
    received: dict[str, list[tuple[str, Box]]] = defaultdict(list)
    for name, region in regions.items():
        received[region.spec.name].append((name, region.box))
    sources: dict[str, SourceSpec] = {}
    copies: list[LayoutCopy] = []
    by_source: dict[str, list[LayoutCopy]] = defaultdict(list)
    for copy in layout.copies:
        by_source[copy.source].append(copy)
    for tensor, spec in layout.sources.items():
        taken = [(copy, _steps(copy, spec.shape)) for copy in by_source[tensor]]
        if any(steps is None for _, steps in taken):
            sources[tensor] = spec
            copies += by_source[tensor]
            continue
        for name, box in received[tensor]:
            sources[name] = SourceSpec(box.shape, spec.dtype)
            for copy, steps in taken:
                assert steps is not None, "checked above"
                copies += _from_slice(copy, *steps, name, box)
    return replace(layout, sources=sources, copies=copies)


def _steps(copy: LayoutCopy, shape: tuple[int, ...]) -> tuple[list[int], list[Step]] | None:
    return steps_of(copy.source_offset, zip(copy.shape, copy.source_strides, copy.target_strides, strict=True), shape)


def steps_of(
    offset: int, dimensions: Iterable[tuple[int, int, int]], shape: tuple[int, ...]
) -> tuple[list[int], list[Step]] | None:
    """The first index of a block in each dimension of its source, of `shape`, and the block's steps along them.

    `dimensions` are length, source stride and target stride of each of the block's. None if they do not follow the source's.
    """
    strides = row_major_strides(shape)
    first, rest = [], offset
    for stride in strides:
        first.append(rest // stride)
        rest %= stride
    steps: list[Step] = []
    for length, stride, target in dimensions:
        found = list(_along(length, stride, target, shape, strides, first))
        if not found and length != 1:
            return None
        steps += found
    reach = [0] * len(shape)
    for step in steps:
        reach[step.axis] += step.stride * (step.length - 1)
    if any(at + far >= size for at, far, size in zip(first, reach, shape, strict=True)):
        return None
    return first, steps


def _along(
    length: int, stride: int, target: int, shape: tuple[int, ...], strides: tuple[int, ...], first: list[int]
) -> Iterator[Step]:
    """One dimension of a copy as steps along dimensions of its source, joined dimensions split; nothing if that is impossible."""
    axis = next((axis for axis, size in enumerate(strides) if size <= stride and shape[axis] > 1), None)
    if length == 1 or axis is None or stride % strides[axis]:
        return
    found: list[Step] = []
    step = stride // strides[axis]
    while first[axis] + step * (length - 1) >= shape[axis]:
        # The copy continues in the next outer dimension, which needs whole rows.
        per, rest = divmod(shape[axis], step)
        if rest or first[axis] or length % per or axis == 0:
            return
        found.append(Step(axis, step, per, target))
        target, length, step = target * per, length // per, 1
        axis -= 1
    yield from found
    if length > 1:
        yield Step(axis, step, length, target)


def _from_slice(copy: LayoutCopy, first: list[int], steps: list[Step], name: str, box: Box) -> Iterator[LayoutCopy]:
    """The part of `copy` that the slice `name` of its source contains."""
    inside = row_major_strides(box.shape)
    by_axis: dict[int, list[Step]] = defaultdict(list)
    for step in steps:
        by_axis[step.axis].append(step)
    choices = [
        list(_in_range(by_axis[axis], first[axis], box.starts[axis], box.stops[axis])) for axis in range(len(inside))
    ]
    for chosen in itertools.product(*choices):
        inner = [step for _, _, each in chosen for step in each]
        offset = sum(
            (at - start) * stride for (at, _, _), start, stride in zip(chosen, box.starts, inside, strict=True)
        )
        yield LayoutCopy(
            name,
            offset,
            tuple(step.stride * inside[step.axis] for step in inner) or (1,),
            copy.target,
            copy.target_offset + sum(moved for _, moved, _ in chosen),
            tuple(step.target for step in inner) or (1,),
            tuple(step.length for step in inner) or (1,),
        )


def _in_range(steps: list[Step], at: int, low: int, high: int) -> Iterator[tuple[int, int, list[Step]]]:
    """The part of `steps` along one dimension, from index `at`, that lies in [`low`, `high`).

    Yields its first index, its distance in the target, and its steps.
    """
    last = at + sum(step.stride * (step.length - 1) for step in steps)
    if last < low or at >= high:
        return
    if low <= at and last < high:
        yield at, 0, steps
        return
    outer = max(steps, key=lambda step: step.stride)
    rest = [step for step in steps if step is not outer]
    if not rest:
        begin = max(0, -(-(low - at) // outer.stride))
        end = min(outer.length, (high - 1 - at) // outer.stride + 1)
        if begin < end:
            yield at + begin * outer.stride, begin * outer.target, [replace(outer, length=end - begin)]
        return
    for index in range(outer.length):
        for first, moved, kept in _in_range(rest, at + index * outer.stride, low, high):
            yield first, moved + index * outer.target, kept
