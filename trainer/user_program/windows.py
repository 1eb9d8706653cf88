"""Windows of items that the data parallel ranks compute together: pure functions of the items' memory."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate


def part_of(items: int, rank: int, world: int) -> range:
    """The items of data parallel rank `rank` in a window of `items` items: a contiguous range, counted from its first one."""
    return range(items * rank // world, items * (rank + 1) // world)


def widest_window(costs: Sequence[int], world: int, available: int) -> int:
    """Return the number of items in the widest window, from the first item on, in which no rank needs more than `available`.

    A window grows while it fits, so it doesn't depend on the items after it. It is 0 if the first item does not fit by itself.
    `costs` are the bytes that each item takes; there are `world` data parallel ranks.
    """
    sums = [0, *accumulate(costs)]
    width = 0
    while width < len(costs) and all(
        sums[part.stop] - sums[part.start] <= available
        for part in (part_of(width + 1, rank, world) for rank in range(world))
    ):
        width += 1
    return width


def window_cost(costs: Sequence[int], items: int, world: int) -> int:
    """Bytes that the rank with the highest need takes in a window."""
    return max(sum(costs[index] for index in part_of(items, rank, world)) for rank in range(world))
