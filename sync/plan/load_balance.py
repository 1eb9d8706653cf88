"""Dealing out what several ranks hold, so that all send about as much.

What a set of ranks holds together is first taken for a liquid that may be divided at will: each rank's quota of it is what makes
the sum of the squares of all loads least, and with it the largest load (Fujishige, "Lexicographically Optimal Base of a
Polymatroid", 1980). Pouring one set's liquid after the other into the least loaded of its ranks, over and over, converges to it:
that is block coordinate descent on a convex function (Tseng, "Convergence of a Block Coordinate Descent Method for
Nondifferentiable Minimization", 2001). Then real pieces are dealt into the quotas, the largest to the emptiest, and cut where
one would overflow it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..version.box import Box, Labels

_ROUNDS = 40
_STILL = 0.002
"""Share of the mean load: when no quota moves by more any longer, pouring ends."""
_OVERFLOW = 0.03
"""Share of the mean load by which a piece may overflow a quota without being cut."""


@dataclass(frozen=True, slots=True)
class SharedSlice:
    """Elements that several ranks hold."""

    tensor: int
    """Place of the tensor among all."""
    box: Box
    itemsize: int
    """Bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Size on the wire in bytes."""
        return self.box.numel * self.itemsize


def balance(free: Mapping[Labels, Sequence[SharedSlice]], load: Sequence[int]) -> Iterator[tuple[int, SharedSlice]]:
    """Give every piece, or each of the rows that it is cut into, to one of its holders.

    Args:
        free: Pieces by the ranks that hold them.
        load: Bytes that each rank sends in any case.

    Yields:
        A rank and what it sends.
    """
    if not free:
        return
    sizes = [sum(piece.nbytes for piece in pieces) for pieces in free.values()]
    mean = (sum(load) + sum(sizes)) / len(load)
    quotas = _quotas(list(free), sizes, load, _STILL * mean)
    for (holders, pieces), quota in zip(free.items(), quotas, strict=True):
        yield from _fill(holders, pieces, quota, _OVERFLOW * mean)


def _quotas(groups: Sequence[Labels], sizes: Sequence[int], load: Sequence[int], still: float) -> list[list[float]]:
    """Of each group's bytes, how many each of its holders sends."""
    loads = [float(nbytes) for nbytes in load]
    quotas = [[0.0] * len(holders) for holders in groups]
    # The groups with the fewest ranks to choose from first: where groups lie within one another, one round is enough.
    order = sorted(range(len(groups)), key=lambda group: (len(groups[group]), groups[group]))
    for _ in range(_ROUNDS):
        moved = 0.0
        for group in order:
            holders, before = groups[group], quotas[group]
            others = [loads[rank] - quota for rank, quota in zip(holders, before, strict=True)]
            quotas[group] = _pour(others, sizes[group])
            for rank, other, old, new in zip(holders, others, before, quotas[group], strict=True):
                moved = max(moved, abs(new - old))
                loads[rank] = other + new
        if moved <= still or len(groups) == 1:
            break
    return quotas


def _pour(loads: Sequence[float], nbytes: float) -> list[float]:
    """How much each gets when `nbytes` are poured onto the lowest of `loads`."""
    below = 0.0
    level = 0.0
    for count, load in enumerate(sorted(loads), start=1):
        if count > 1 and load >= level:
            break
        below += load
        level = (nbytes + below) / count
    return [max(0.0, level - load) for load in loads]


def _fill(
    holders: Labels, pieces: Sequence[SharedSlice], quota: Sequence[float], overflow: float
) -> Iterator[tuple[int, SharedSlice]]:
    """Deal pieces into quotas: the largest into the emptiest."""
    waiting = [(-piece.nbytes, piece.tensor, piece.box.starts, piece) for piece in pieces]
    room = [(-left, rank) for rank, left in zip(holders, quota, strict=True)]
    heapq.heapify(waiting)
    heapq.heapify(room)
    while waiting:
        size, _, _, piece = heapq.heappop(waiting)
        left, rank = room[0]
        given = piece
        if -size > -left + overflow and (cut := _cut(piece, -left)):
            given, *rest = cut
            for other in rest:
                heapq.heappush(waiting, (-other.nbytes, other.tensor, other.box.starts, other))
            if (
                given.nbytes > -left + overflow
            ):  # one row, still too much: it is cut along its columns when it is its turn
                heapq.heappush(waiting, (-given.nbytes, given.tensor, given.box.starts, given))
                continue
        heapq.heapreplace(room, (left + given.nbytes, rank))
        yield rank, given


def _cut(piece: SharedSlice, nbytes: float) -> tuple[SharedSlice, SharedSlice] | None:
    """`piece` in two along its first axis that has more than one index, the first about `nbytes` large; None for one element."""
    starts, shape = piece.box.starts, piece.box.shape
    axis = next((axis for axis, size in enumerate(shape) if size > 1), None)
    if axis is None:
        return None
    row = piece.nbytes // shape[axis]
    size = min(max(round(nbytes / row), 1), shape[axis] - 1)
    first = Box(starts, (*shape[:axis], size, *shape[axis + 1 :]))
    second = Box(
        (*starts[:axis], starts[axis] + size, *starts[axis + 1 :]),
        (*shape[:axis], shape[axis] - size, *shape[axis + 1 :]),
    )
    return SharedSlice(piece.tensor, first, piece.itemsize), SharedSlice(piece.tensor, second, piece.itemsize)
