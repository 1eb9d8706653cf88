"""Load balance: elements that several ranks hold are assigned so that all ranks send about as many bytes.

First the bytes of each set of holders are divided among the holders as if they could be split anywhere. The quotas minimise the
sum of the squares of all loads, and with it the largest load (Fujishige, "Lexicographically Optimal Base of a Polymatroid",
1980). They are found by rounds that assign the bytes of one set after the other to its least loaded ranks. The rounds converge,
because this is block coordinate descent on a convex function (Tseng, "Convergence of a Block Coordinate Descent Method for
Nondifferentiable Minimization", 2001). Then real slices fill the quotas, the largest slice into the largest quota. A slice that
would overflow a quota is cut.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..version.box import Box, Labels

_ROUNDS = 40
"""Limit for the rounds over all sets of holders, in case the quotas do not converge before. Nested sets need one round."""
_STILL = 0.002
"""Tolerance of convergence, as a share of the mean load: the rounds end when no quota changes by more."""
_OVERFLOW = 0.03
"""Share of the mean load by which a slice may overflow a quota without being cut, because every cut adds a slice."""


@dataclass(frozen=True, slots=True)
class SharedSlice:
    """Elements of a tensor that several ranks hold."""

    tensor: int
    """Index of the tensor."""
    box: Box
    itemsize: int
    """Bytes of an element."""

    @property
    def nbytes(self) -> int:
        """Size on the wire in bytes."""
        return self.box.numel * self.itemsize


def balance(shared: Mapping[Labels, Sequence[SharedSlice]], load: Sequence[int]) -> Iterator[tuple[int, SharedSlice]]:
    """Assign every slice, or each of the rows that it is cut into, to one of its holders.

    Args:
        shared: Slices by the ranks that hold them.
        load: Bytes that each rank sends in any case.

    Yields:
        A rank and a slice that it sends.
    """
    if not shared:
        return
    sizes = [sum(each.nbytes for each in slices) for slices in shared.values()]
    mean = (sum(load) + sum(sizes)) / len(load)
    quotas = _quotas(list(shared), sizes, load, _STILL * mean)
    for (holders, slices), quota in zip(shared.items(), quotas, strict=True):
        yield from _fill(holders, slices, quota, _OVERFLOW * mean)


def _quotas(groups: Sequence[Labels], sizes: Sequence[int], load: Sequence[int], still: float) -> list[list[float]]:
    """For each group of holders, the bytes of the group that each holder sends; `sizes` are the bytes of each group."""
    loads = [float(nbytes) for nbytes in load]
    quotas = [[0.0] * len(holders) for holders in groups]
    # Small groups first: if groups are nested, one round is enough.
    order = sorted(range(len(groups)), key=lambda group: (len(groups[group]), groups[group]))
    for _ in range(_ROUNDS):
        moved = 0.0
        for group in order:
            holders, before = groups[group], quotas[group]
            others = [loads[rank] - quota for rank, quota in zip(holders, before, strict=True)]
            quotas[group] = _add_to_least(others, sizes[group])
            for rank, other, old, new in zip(holders, others, before, quotas[group], strict=True):
                moved = max(moved, abs(new - old))
                loads[rank] = other + new
        if moved <= still or len(groups) == 1:
            break
    return quotas


def _add_to_least(loads: Sequence[float], nbytes: float) -> list[float]:
    """Distribute `nbytes` over the smallest of `loads` so that these become equal. Returns the bytes added to each load."""
    below = 0.0
    target = 0.0
    for count, load in enumerate(sorted(loads), start=1):
        if count > 1 and load >= target:
            break
        below += load
        target = (nbytes + below) / count
    return [max(0.0, target - load) for load in loads]


def _fill(
    holders: Labels, slices: Sequence[SharedSlice], quota: Sequence[float], overflow: float
) -> Iterator[tuple[int, SharedSlice]]:
    """Fill quotas with slices, the largest slice into the quota with the most room."""
    waiting = [_entry(each) for each in slices]
    room = [(-left, rank) for rank, left in zip(holders, quota, strict=True)]
    heapq.heapify(waiting)
    heapq.heapify(room)
    while waiting:
        each = heapq.heappop(waiting)[-1]
        left, rank = -room[0][0], room[0][1]
        if each.nbytes > left + overflow and (cut := _cut(each, left)):
            each, rest = cut
            heapq.heappush(waiting, _entry(rest))
            if each.nbytes > left + overflow:  # one row is still too large: it is cut along its columns when it is next
                heapq.heappush(waiting, _entry(each))
                continue
        heapq.heapreplace(room, (each.nbytes - left, rank))
        yield rank, each


def _entry(each: SharedSlice) -> tuple[int, int, tuple[int, ...], SharedSlice]:
    """The slice as an entry of a heap that pops the largest slice first."""
    return -each.nbytes, each.tensor, each.box.starts, each


def _cut(each: SharedSlice, nbytes: float) -> tuple[SharedSlice, SharedSlice] | None:
    """Cut a slice in two along its first axis of size > 1, the first part of about `nbytes` bytes; None for one element."""
    box = each.box
    axis = next((axis for axis, size in enumerate(box.shape) if size > 1), None)
    if axis is None:
        return None
    start, whole = box.starts[axis], box.shape[axis]
    size = min(max(round(nbytes / (each.nbytes // whole)), 1), whole - 1)
    first, second = box.with_axis(axis, start, size), box.with_axis(axis, start + size, whole - size)
    return SharedSlice(each.tensor, first, each.itemsize), SharedSlice(each.tensor, second, each.itemsize)
