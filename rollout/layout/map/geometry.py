"""Geometry of strided blocks of elements: simplify, join, count how often blocks cover each element."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import torch

from weightlane.sync.version.box import row_major_strides

from .layout_map import LayoutCopy

Block = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Offset, strides and shape, in elements."""
Dimensions = list[tuple[int, int, int]]
"""Length, source stride and target stride of each dimension, outermost first."""


def simplified(dimensions: Iterable[tuple[int, int, int]]) -> Dimensions:
    """`dimensions` without those of length one, neighbours joined where both sides are contiguous; at least one is left."""
    joined: Dimensions = []
    for length, source, target in dimensions:
        if length == 1:
            continue
        if joined and joined[-1][1] == source * length and joined[-1][2] == target * length:
            joined[-1] = (joined[-1][0] * length, source, target)
        else:
            joined.append((length, source, target))
    return joined or [(1, 1, 1)]


def without_broadcasts(offset: int, dimensions: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, Dimensions]]:
    """Target offset and remaining dimensions of each copy that together write a broadcast source (stride 0)."""
    wide = [(length, target) for length, source, target in dimensions if source == 0 and length != 1]
    rest = [item for item in dimensions if item[1] != 0]
    for index in itertools.product(*(range(length) for length, _ in wide)):
        yield offset + sum(at * stride for at, (_, stride) in zip(index, wide, strict=True)), rest


def overlaps_itself(block: Block) -> bool:
    """Whether two indices of `block` may address the same element; never False when they do."""
    reach = 0
    for stride, length in sorted(item for item in zip(block[1], block[2], strict=True) if item[1] != 1):
        if stride <= reach:
            return True
        reach += stride * (length - 1)
    return False


def simplified_copy(
    source: str, source_offset: int, target: str, target_offset: int, dimensions: Iterable[tuple[int, int, int]]
) -> LayoutCopy:
    """A copy whose `dimensions` are simplified."""
    lengths, steps, strides = (tuple(column) for column in zip(*simplified(dimensions), strict=True))
    return LayoutCopy(source, source_offset, steps, target, target_offset, strides, lengths)


def joined_copies(copies: Iterable[LayoutCopy]) -> list[LayoutCopy]:
    """`copies` in their order, each joined with the one before where it continues that in the outermost dimension.

    Loaders split fused tensors into one copy per part, and the parts are often adjacent on both sides.
    """
    result: list[LayoutCopy] = []
    for copy in copies:
        last = result[-1] if result else None
        if last is not None and _continues(last, copy):
            dimensions = zip(
                (last.shape[0] + copy.shape[0], *last.shape[1:]), last.source_strides, last.target_strides, strict=True
            )
            result[-1] = simplified_copy(last.source, last.source_offset, last.target, last.target_offset, dimensions)
        else:
            result.append(copy)
    return result


def _continues(last: LayoutCopy, copy: LayoutCopy) -> bool:
    return (
        (last.source, last.target, last.source_strides, last.target_strides, last.shape[1:])
        == (copy.source, copy.target, copy.source_strides, copy.target_strides, copy.shape[1:])
        and copy.source_offset == last.source_offset + last.shape[0] * last.source_strides[0]
        and copy.target_offset == last.target_offset + last.shape[0] * last.target_strides[0]
    )


def blocks_read(copies: Iterable[LayoutCopy]) -> dict[str, set[Block]]:
    """The blocks that `copies` read, by checkpoint tensor."""
    blocks: dict[str, set[Block]] = defaultdict(set)
    for copy in copies:
        blocks[copy.source].add((copy.source_offset, copy.source_strides, copy.shape))
    return blocks


def target_block(copy: LayoutCopy) -> Block:
    """The block that `copy` writes."""
    return copy.target_offset, copy.target_strides, copy.shape


def blocks_between(copy: LayoutCopy, start: int, stop: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """The part of `copy` whose source elements lie in [`start`, `stop`), as few blocks with the strides of `copy`.

    Yields shape, source offset and target offset of each. The source strides of a copy are a mixed radix: indices that are
    ordered by stride are in the order of the elements.
    """
    order = sorted(range(len(copy.shape)), key=lambda axis: -copy.source_strides[axis])
    reach = [0]  # of the axes from the last one back
    for axis in reversed(order):
        reach.append(reach[-1] + (copy.shape[axis] - 1) * copy.source_strides[axis])
    reach.reverse()
    shape, indices = list(copy.shape), [0] * len(copy.shape)

    def inside(depth: int, low: int, high: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
        """Blocks of the axes from `depth` on, between `low` and `high` relative to the indices of the outer axes."""
        if high <= 0 or low > reach[depth] or 0 in copy.shape:
            return
        if depth == len(order) or (low <= 0 and high > reach[depth]):
            source = sum(at * step for at, step in zip(indices, copy.source_strides, strict=True))
            target = sum(at * stride for at, stride in zip(indices, copy.target_strides, strict=True))
            yield tuple(shape), copy.source_offset + source, copy.target_offset + target
            return
        axis = order[depth]
        step, length = copy.source_strides[axis], copy.shape[axis]
        first = max(0, -(-(low - reach[depth + 1]) // step))  # the first index with anything in it
        last = min(length - 1, (high - 1) // step)
        inner = max(first, -(-low // step)), min(last, (high - 1 - reach[depth + 1]) // step)
        index = first
        while index <= last:
            if inner[0] <= index <= inner[1]:
                shape[axis], indices[axis] = inner[1] - index + 1, index
                yield from inside(len(order), 0, 1)
                index = inner[1] + 1
            else:
                shape[axis], indices[axis] = 1, index
                yield from inside(depth + 1, low - index * step, high - index * step)
                index += 1
        shape[axis], indices[axis] = length, 0

    yield from inside(0, start - copy.source_offset, stop - copy.source_offset)


class Cover:
    """Counts how often blocks cover each element of a storage, in units of the blocks' common contiguous run.

    Layouts of real models consist of long runs, so that thousands of counters are exact for millions of elements. Every block
    that is added or viewed later has to be among `blocks`.
    """

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._blocks = [_sorted(block) for block in blocks]
        self.unit = math.gcd(*(number for block in self._blocks for number in _granularity(block))) or 1
        end = max((_end(block) for block in self._blocks), default=0)
        self.counts = torch.zeros(-(-end // self.unit), dtype=torch.int32)
        """Number of added blocks that cover each unit."""

    def add(self, block: Block) -> None:
        """Count `block`."""
        self.view(block).add_(1)

    def view(self, block: Block) -> torch.Tensor:
        """The counters of `block`."""
        offset, strides, shape = _sorted(block)
        if self.unit > 1:  # Then every block runs along stride 1.
            shape = (*shape[:-1], shape[-1] // self.unit)
            strides = (*(stride // self.unit for stride in strides[:-1]), 1)
        return self.counts.as_strided(shape, strides, offset // self.unit)


def _sorted(block: Block) -> Block:
    """The same elements with the smallest stride last, neighbouring dimensions joined."""
    offset, strides, shape = block
    ordered = sorted(zip(strides, shape, strict=True), reverse=True)
    joined = simplified((length, stride, stride) for stride, length in ordered)
    return offset, tuple(stride for _, stride, _ in joined), tuple(length for length, _, _ in joined)


def _granularity(block: Block) -> Iterator[int]:
    offset, strides, shape = block
    yield offset
    if strides[-1] == 1:
        yield shape[-1]
        yield from strides[:-1]
    else:
        yield 1


def _end(block: Block) -> int:
    offset, strides, shape = block
    if 0 in shape:
        return 0
    return offset + 1 + sum((length - 1) * stride for stride, length in zip(strides, shape, strict=True))


def elements_of(shape: Sequence[int]) -> Block:
    """All elements of a contiguous tensor of `shape`."""
    return 0, row_major_strides(tuple(shape)), tuple(shape)
