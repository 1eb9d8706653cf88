"""Assign sequences to data parallel ranks and micro-batches: pure functions of lengths."""

from __future__ import annotations

from collections.abc import Sequence


def shares(lengths: Sequence[int], world: int) -> list[list[int]]:
    """Assign every sequence to one of `world` ranks, balanced by tokens. The result is the same on every rank.

    Longest first, each to the rank with the fewest tokens so far (lowest rank on a tie). A rank's share may be empty.

    Returns:
        Indices of sequences, longest first, for each rank.
    """
    found: list[list[int]] = [[] for _ in range(world)]
    loads = [0] * world
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        rank = loads.index(min(loads))
        found[rank].append(index)
        loads[rank] += lengths[index]
    return found


def micro_batches(
    lengths: Sequence[int], world: int, max_tokens: int, *, padded: bool, sequences_per_unit: int = 1
) -> list[list[list[int]]]:
    """Return the micro-batches of each rank: equally many on every rank, some of them empty.

    Each holds at most `max_tokens` tokens, except where a single unit is longer. A unit is `sequences_per_unit` consecutive
    sequences, which stay in one micro-batch and in their order. With `padded`, the model pads every sequence of a micro-batch to
    the longest, so that padding counts, too.

    Returns:
        For each of the `world` data parallel ranks its micro-batches, each a list of indices of sequences.
    """
    units = [lengths[first : first + sequences_per_unit] for first in range(0, len(lengths), sequences_per_unit)]
    plans = [_cut(share, units, max_tokens, padded=padded) for share in shares([sum(unit) for unit in units], world)]
    count = max(len(plan) for plan in plans)
    return [
        [[unit * sequences_per_unit + place for unit in part for place in range(sequences_per_unit)] for part in plan]
        + [[] for _ in range(count - len(plan))]
        for plan in plans
    ]


def _cut(share: Sequence[int], units: Sequence[Sequence[int]], max_tokens: int, *, padded: bool) -> list[list[int]]:
    """Divide a rank's units of sequences, those with most tokens first, into micro-batches within the budget."""
    if padded:
        rows: list[list[int]] = []
        for index in sorted(share, key=lambda index: -max(units[index])):  # the first has the longest sequence
            if rows and (len(rows[-1]) + 1) * len(units[index]) * max(units[rows[-1][0]]) <= max_tokens:
                rows[-1].append(index)
            else:
                rows.append([index])
        return rows
    packs: list[list[int]] = []
    free: list[int] = []
    for index in share:  # first fit, decreasing
        tokens = sum(units[index])
        fits = next((place for place, room in enumerate(free) if room >= tokens), None)
        if fits is None:
            packs.append([index])
            free.append(max_tokens - tokens)
        else:
            packs[fits].append(index)
            free[fits] -= tokens
    return packs
