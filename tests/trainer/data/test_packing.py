"""Which sequences a rank computes, and in which micro-batches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightlane.trainer.data.packing import micro_batches, shares

lengths_of = st.lists(st.integers(1, 18), min_size=1, max_size=12)


@given(lengths_of, st.integers(1, 5))
def test_every_sequence_goes_to_exactly_one_rank_and_loads_are_balanced(lengths: list[int], world: int) -> None:
    found = shares(lengths, world)
    assert sorted(index for share in found for index in share) == list(range(len(lengths)))
    loads = [sum(lengths[index] for index in share) for share in found]
    assert max(loads) - min(loads) <= max(lengths)


@given(lengths_of, st.integers(1, 4), st.integers(1, 4), st.integers(1, 60), st.booleans())
def test_ranks_run_equally_many_micro_batches_within_the_budget_and_pairs_stay_together(
    lengths: list[int], together: int, world: int, max_tokens: int, padded: bool
) -> None:
    lengths = lengths * together  # a multiple
    plans = micro_batches(lengths, world, max_tokens, padded=padded, together=together)
    assert len({len(plan) for plan in plans}) == 1
    parts = [part for plan in plans for part in plan]
    units = [part[first : first + together] for part in parts for first in range(0, len(part), together)]
    assert sorted(units) == [[*range(first, first + together)] for first in range(0, len(lengths), together)]
    for part in (part for part in parts if len(part) > together):
        each = [lengths[index] for index in part]
        assert (len(each) * max(each) if padded else sum(each)) <= max_tokens
    loads = [sum(lengths[index] for part in plan for index in part) for plan in plans]
    assert max(loads) - min(loads) <= max(sum(lengths[index] for index in unit) for unit in units)


def test_packing_fills_what_padding_wastes_and_a_pair_counts_as_a_whole() -> None:
    lengths = [8, 1, 1, 1, 1, 1, 1, 1, 1]
    assert micro_batches(lengths, 1, 8, padded=False) == [[[0], [1, 2, 3, 4, 5, 6, 7, 8]]]
    assert len(micro_batches([8, *[5] * 3, *[3] * 3], 1, 8, padded=True)[0]) == 6
    lengths = [1, 8, 5, 5, 2, 2]  # pairs of 9, 10 and 4 tokens
    assert micro_batches(lengths, 2, 100, padded=False, together=2) == [[[2, 3]], [[0, 1, 4, 5]]]
    assert micro_batches(lengths, 1, 32, padded=True, together=2) == [[[0, 1, 2, 3], [4, 5]]]
    assert micro_batches(lengths, 1, 31, padded=True, together=2) == [[[0, 1], [2, 3, 4, 5]]]
