"""Assign sequences to data parallel ranks and micro-batches, and find prefixes that sequences share: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np
import numpy.typing as npt
import torch

LEAST_SHARED = 16
"""Fewest tokens of a shared prefix: a shorter one saves less than the group's own attention call costs."""
_LEAST_SHARE = 1 / 16
"""Least length of a shared prefix, as a share of the longest sequence that has it."""
_MOST_MEMBERS = 512
"""Most sequences of a group, which bounds the time of the search."""
_FINER = (1, 2, 4, 8)
"""Into how many parts of a rank's share a large group is split, in the plans that are compared."""

_BLOCKS = (2, 4, 8)
"""Into how many blocks for each rank a row is cut, in the plans that are compared."""
_UNBALANCED = 1.05
"""How much more than the average the rank with most work may have, if a plan with more blocks is not to be tried."""


@dataclass(frozen=True, slots=True)
class PrefixGroup:
    """Sequences that begin with the same tokens."""

    members: tuple[int, ...]
    """Indices of sequences, ascending."""
    shared: int
    """Number of tokens that all members begin with, and that are computed once; 0 of a sequence by itself."""


def shared_prefixes(sequences: Sequence[torch.Tensor]) -> list[PrefixGroup]:
    """Group sequences of tokens, int64 [T] each, on the CPU, by the prefixes they share, so that most tokens are saved.

    A prefix counts only if it is long enough to be worth a group. A part of a group can always form a group itself, so that
    a micro-batch with some of its members saves what was predicted.

    Returns:
        Each sequence in one group, ordered by their first members.
    """
    rows: list[npt.NDArray[np.int64]] = [each.numpy() for each in sequences]
    order = sorted(range(len(rows)), key=lambda index: rows[index].tobytes())  # equal beginnings are neighbours now
    count = len(order)
    lengths = np.array([len(rows[index]) for index in order])
    common = np.array([0, *(_common(rows[left], rows[right]) for left, right in pairwise(order))])
    saved = np.zeros(count + 1, dtype=np.int64)
    """Most tokens saved among the first sequences."""
    begins, shares = list(range(-1, count)), [0] * (count + 1)
    """Start, and shared tokens, of the group that ends before each index."""
    for stop in range(1, count + 1):
        saved[stop] = saved[stop - 1]
        if common[stop - 1] < LEAST_SHARED:
            continue
        low = max(0, stop - _MOST_MEMBERS)
        shared = np.minimum.accumulate(common[low + 1 : stop][::-1])  # of groups of 2, 3, ... that end here
        longest = np.maximum.accumulate(lengths[low:stop][::-1])[1:]
        worth = (shared >= LEAST_SHARED) & (shared >= _LEAST_SHARE * longest)
        total = saved[low : stop - 1][::-1] + np.where(worth, shared * np.arange(1, len(shared) + 1), 0)
        if total[best := int(total.argmax())] > saved[stop]:
            saved[stop], begins[stop], shares[stop] = total[best], stop - 2 - best, int(shared[best])
    groups, stop = [], count
    while stop:
        groups.append(PrefixGroup(tuple(sorted(order[begins[stop] : stop])), shares[stop]))
        stop = begins[stop]
    return sorted(groups, key=lambda group: group.members[0])


def _common(left: npt.NDArray[np.int64], right: npt.NDArray[np.int64]) -> int:
    """Number of tokens that two sequences begin with alike."""
    length = min(len(left), len(right))
    if length and left[0] != right[0]:
        return 0
    different = left[:length] != right[:length]
    return int(different.argmax()) if different.any() else length


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


def balanced_blocks(costs: torch.Tensor, ranks: int) -> list[list[tuple[int, int]]]:
    """Divide a row of tokens, at least one, among `ranks`: equally many for each, and about equal costs.

    The row is cut into equal blocks, which the ranks take in turns, the most expensive first, and in the other direction in every
    other turn. Of one long sequence, whose tokens cost more the later they are, a rank gets an early and a late block.

    Args:
        costs: int64 [tokens], what each token costs.
        ranks: Number of ranks.

    Returns:
        For each rank its blocks, as first token and end, in order; neighbours are one. Beyond the row's end they are padding.
    """
    found: list[tuple[float, list[list[tuple[int, int]]]]] = []
    for per_rank in _BLOCKS:
        size = -(-len(costs) // (per_rank * ranks))
        blocks = torch.nn.functional.pad(costs, (0, per_rank * ranks * size - len(costs))).view(-1, size).sum(1)
        turns = blocks.argsort(descending=True, stable=True).view(per_rank, ranks)
        turns[1::2] = turns[1::2].flip(1)
        most = float(blocks[turns].sum(0).max() * ranks / blocks.sum())
        found.append((most, [_joined(sorted(of_rank), size) for of_rank in turns.T.tolist()]))
        if most <= _UNBALANCED:
            break
    return min(found, key=lambda each: each[0])[1]


def _joined(blocks: Sequence[int], size: int) -> list[tuple[int, int]]:
    """Return where `blocks` of `size` tokens begin and end; adjoining ones as one."""
    found: list[tuple[int, int]] = []
    for block in blocks:
        first = block * size
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, (block + 1) * size))
    return found


def micro_batches(
    lengths: Sequence[int],
    world: int,
    max_tokens: int,
    *,
    padded: bool,
    sequences_per_unit: int = 1,
    prefixes: Sequence[PrefixGroup] = (),
) -> list[list[list[int]]]:
    """Return the micro-batches of each rank: equally many on every rank, some of them empty.

    Each holds at most `max_tokens` tokens, except where a single unit is longer. A unit is `sequences_per_unit` consecutive
    sequences, which stay in one micro-batch and in their order. With `padded`, the model pads every sequence of a micro-batch to
    the longest, so that padding counts, too. Tokens that a group of `prefixes` shares count once in a micro-batch. Groups stay
    together, unless they are too large, or the ranks would be unbalanced.

    Returns:
        For each of the `world` data parallel ranks its micro-batches, each a list of indices of sequences.
    """
    units = [lengths[first : first + sequences_per_unit] for first in range(0, len(lengths), sequences_per_unit)]
    if padded:
        plans = [_rows(share, units, max_tokens) for share in shares([sum(unit) for unit in units], world)]
    else:
        plans = [_packs(share, max_tokens) for share in _balanced(_unit_groups(units, prefixes), world, max_tokens)]
    count = max(len(plan) for plan in plans)
    return [
        [[unit * sequences_per_unit + place for unit in part for place in range(sequences_per_unit)] for part in plan]
        + [[] for _ in range(count - len(plan))]
        for plan in plans
    ]


@dataclass(frozen=True, slots=True)
class _Units:
    """Units that all begin with `shared` tokens, and the tokens of each beside these, or of a single unit all its tokens."""

    units: tuple[int, ...]
    shared: int
    others: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Tokens that the model computes where these units are in one micro-batch."""
        return self.shared + sum(self.others)

    def parts(self, count: int) -> list[_Units]:
        """Split into `count` parts, balanced by tokens; none is empty unless there are fewer units."""
        return [
            _Units(tuple(self.units[at] for at in part), self.shared, tuple(self.others[at] for at in part))
            for part in map(sorted, shares([1 + tokens for tokens in self.others], count))
        ]


def _unit_groups(units: Sequence[Sequence[int]], prefixes: Sequence[PrefixGroup]) -> list[_Units]:
    """Group units whose sequences are all in the same group of `prefixes`, ordered by their first units."""
    group_of = {index: number for number, group in enumerate(prefixes) if group.shared for index in group.members}
    found: dict[object, list[int]] = {}
    for unit, lengths in enumerate(units):
        groups = {group_of.get(unit * len(lengths) + place) for place in range(len(lengths))}
        (only,) = groups if len(groups) == 1 else (None,)
        found.setdefault(("alone", unit) if only is None else only, []).append(unit)
    return [
        _Units(tuple(members), shared, tuple(sum(length - shared for length in units[unit]) for unit in members))
        for key, members in found.items()
        for shared in [prefixes[key].shared if isinstance(key, int) else 0]
    ]


def _balanced(groups: Sequence[_Units], world: int, max_tokens: int) -> list[list[_Units]]:
    """Assign groups, or parts of them, to ranks, so that the rank with most tokens has as few as possible."""
    even = sum(group.tokens for group in groups) / world
    plans = [_parts(groups, even / finer, max_tokens) for finer in _FINER]
    plans.append([_Units(part.units, 0, (part.tokens,)) for group in groups for part in group.parts(len(group.units))])
    found = []
    for plan in plans:
        parts = [[plan[at] for at in share] for share in shares([part.tokens for part in plan], world)]
        found.append((max(sum(part.tokens for part in share) for share in parts), parts))
    return min(found, key=lambda each: each[0])[1]


def _parts(groups: Sequence[_Units], most: float, max_tokens: int) -> list[_Units]:
    """Split every group into the fewest parts of about `most` and at most `max_tokens` tokens."""
    found = []
    for group in groups:
        count = min(len(group.units), ceil(group.tokens / most))
        parts = group.parts(count)
        while count < len(group.units) and max(part.tokens for part in parts) > max_tokens:
            count += 1
            parts = group.parts(count)
        found += parts
    return found


def _rows(share: Sequence[int], units: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Divide a rank's units of sequences into micro-batches whose sequences are padded to the longest."""
    rows: list[list[int]] = []
    for index in sorted(share, key=lambda index: -max(units[index])):  # the first has the longest sequence
        if rows and (len(rows[-1]) + 1) * len(units[index]) * max(units[rows[-1][0]]) <= max_tokens:
            rows[-1].append(index)
        else:
            rows.append([index])
    return rows


def _packs(share: Sequence[_Units], max_tokens: int) -> list[list[int]]:
    """Divide a rank's units, those with most tokens first, into micro-batches without padding: first fit, decreasing."""
    packs: list[list[int]] = []
    free: list[int] = []
    for each in share:
        fits = next((place for place, room in enumerate(free) if room >= each.tokens), None)
        if fits is None:
            packs.append([])
            free.append(max_tokens)
            fits = -1
        packs[fits] += each.units
        free[fits] -= each.tokens
    return packs
