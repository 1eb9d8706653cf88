"""Windows of items that the data parallel ranks compute together: pure functions of the items' tokens and memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def parts_of(tokens: Sequence[int], world: int) -> list[range]:
    """Divide a window among `world` data parallel ranks: contiguous ranges of items, counted from its first one.

    An item goes to the rank in whose equal share of all `tokens` its own middle is: no rank has more than its share and one
    item, and neighbours, which may share a prefix, stay together.
    """
    return _parts([0, *accumulate(tokens)], len(tokens), world)


def widest_window(costs: Sequence[int], tokens: Sequence[int], world: int, available: int) -> int:
    """Return the number of items in the widest window, from the first item on, in which no rank needs more than `available`.

    A window grows while it fits, so it doesn't depend on the items after it. It is 0 if the first item does not fit by itself.
    `costs` are the bytes that each item takes, and `tokens` its tokens.
    """
    sums, ends = [0, *accumulate(costs)], [0, *accumulate(tokens)]
    width = 0
    while width < len(costs) and all(
        sums[part.stop] - sums[part.start] <= available for part in _parts(ends, width + 1, world)
    ):
        width += 1
    return width


def _parts(ends: Sequence[int], items: int, world: int) -> list[range]:
    """See `parts_of`; `ends` are the tokens before each item, and those of all."""

    def twice_the_middle(item: int) -> int:
        return (ends[item] + ends[item + 1]) * world

    firsts = [bisect_left(range(items), 2 * rank * ends[items], key=twice_the_middle) for rank in range(world)]
    return [range(first, stop) for first, stop in zip(firsts, [*firsts[1:], items], strict=True)]
