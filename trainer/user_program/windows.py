"""Windows of items that the data parallel ranks compute together: pure functions of the items' memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate


def part_of(first: int, items: int, rank: int, world: int) -> range:
    """The items of data parallel rank `rank` in a window of `items` items from `first` on: a contiguous range."""
    return range(first + items * rank // world, first + items * (rank + 1) // world)


@lru_cache(maxsize=64)
def planned_windows(costs: tuple[int, ...], world: int, available: int) -> tuple[int, ...]:
    """The numbers of items of successive windows, each the widest in which no rank needs more than `available`.

    A window grows while it fits, so it doesn't depend on the items after it. The result is cached, because a program often
    computes the same items several times.

    Args:
        costs: Bytes that each item takes.
        world: Data parallel ranks.
        available: Bytes that the rank with the fewest has.

    Returns:
        Numbers of items, in order. They end before the first item that does not fit by itself.
    """
    sums = [0, *accumulate(costs)]
    found: list[int] = []
    first = 0
    while first < len(costs) and (width := _widest(sums, first, world, available)):
        found.append(width)
        first += width
    return tuple(found)


def window_cost(costs: Sequence[int], first: int, items: int, world: int) -> int:
    """Bytes that the rank with the highest need takes in a window."""
    return max(sum(costs[index] for index in part_of(first, items, rank, world)) for rank in range(world))


def _widest(sums: Sequence[int], first: int, world: int, available: int) -> int:
    width, most = 0, len(sums) - 1 - first
    while width < most and all(
        sums[part.stop] - sums[part.start] <= available
        for part in (part_of(first, width + 1, rank, world) for rank in range(world))
    ):
        width += 1
    return width
