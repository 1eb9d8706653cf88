"""Token sequences, batches, and the micro-batches that ranks compute."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightlane.ckpt_engines import ProtocolError
from weightlane.trainer.data.batch import LossDenominators, TokenBatch
from weightlane.trainer.data.packing import LEAST_SHARED, micro_batches, shared_prefixes
from weightlane.trainer.data.sequences import IGNORED, MicroBatch, TokenSequence

ids = st.lists(st.integers(0, 99), min_size=1, max_size=9)
completions = st.builds(
    lambda prompt, completion: TokenSequence.of_completion(
        prompt,
        completion,
        per_token={"values": [token / 7 for token in completion]},
        per_sequence={"weight": len(prompt)},
    ),
    ids,
    ids,
)


def test_a_completion_is_predicted_from_the_token_before_each_of_its_own() -> None:
    sequence = TokenSequence.of_completion(
        [1, 2], [3, 4, 5], masked=1, per_token={"advantages": 2.0, "logprobs": [-0.5, -1.0, -1.5]}
    )
    assert sequence.tokens.tolist() == [1, 2, 3, 4]
    assert sequence.targets.tolist() == [IGNORED, IGNORED, 4, 5]
    assert sequence.per_token["advantages"].tolist() == [0.0, 2.0, 2.0, 2.0]
    assert sequence.per_token["logprobs"].tolist() == [0.0, -0.5, -1.0, -1.5]
    assert (sequence.length, sequence.target_tokens) == (4, 2)
    assert LossDenominators.of(TokenBatch((sequence,)), TokenBatch((sequence, sequence))) == LossDenominators(6, 3)


@given(st.lists(completions, min_size=1, max_size=6))
def test_a_micro_batch_has_every_token_once_with_its_values_packed_and_padded(sequences: list[TokenSequence]) -> None:
    micro = MicroBatch.of(sequences)
    assert micro.tokens.tolist() == [token for each in sequences for token in each.tokens.tolist()]
    assert micro.positions.tolist() == [place for each in sequences for place in range(each.length)]
    assert micro.sequence_of.tolist() == [row for row, each in enumerate(sequences) for _ in range(each.length)]
    assert micro.per_sequence["weight"].tolist() == [each.per_sequence["weight"] for each in sequences]
    for part, each in zip(micro.split(micro.per_token["values"]), sequences, strict=True):
        assert torch.equal(part, each.per_token["values"])
    sums = [math.fsum(each.per_token["values"].tolist()) for each in sequences]
    assert micro.sum_by_sequence(micro.per_token["values"]).tolist() == pytest.approx(sums, rel=1e-5, abs=1e-5)
    assert int(micro.mask.sum()) == TokenBatch(tuple(sequences)).target_tokens
    tokens, places = micro.padded()
    assert tokens.shape == (len(sequences), max(each.length for each in sequences))
    for row, each in enumerate(sequences):
        assert tokens[row, : each.length].tolist() == each.tokens.tolist()
    assert torch.equal(tokens.flatten()[places], micro.tokens)


def one(*sequences: TokenSequence) -> TokenBatch:
    return TokenBatch(sequences)


def of_tokens(tokens: list[int], targets: Any = None, per_token: Any = None) -> TokenSequence:
    return TokenSequence(torch.tensor(tokens), torch.tensor(tokens if targets is None else targets), per_token or {})


def scored(*logprobs: float) -> TokenSequence:
    return TokenSequence.of_completion([1], [8, 9], per_token={"logprobs": logprobs})


FINE = scored(-1.0, -1.0)


def test_what_is_empty_ragged_or_not_a_number_is_refused_by_name_and_index() -> None:
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: one(FINE, scored(-1.0, math.nan)), r"logprobs of token 1 \(id 8\) of sequence 1 is nan"),
        (lambda: one(FINE, scored(-1.0, -math.inf)), r"logprobs of token 1 \(id 8\) of sequence 1 is -inf"),
        (
            lambda: one(of_tokens([0, 1], None, {"topk": torch.tensor([[0.0, 0.0], [math.nan, 0.0]])})),
            r"topk of token 1 \(id 1\) of sequence 0 is \[nan, 0.0\]",
        ),
        (
            lambda: one(TokenSequence.of_completion([1], [2], per_sequence={"reward": math.nan})),
            "reward of sequence 0 is nan",
        ),
        (lambda: scored(-1.0), "2 completion tokens came with 1 logprobs"),
        (lambda: TokenSequence.of_completion([], [2]), "at least one prompt token and one completion token"),
        (lambda: TokenSequence.of_completion([1], [2], masked=1), "1 of 1 completion tokens are masked"),
        (lambda: TokenSequence(torch.zeros(2, 2), torch.zeros(2)), r"tokens have shape \[2, 2\]"),
        (lambda: of_tokens([0, 1, 2], [0, 1]), r"targets has shape \[2\] beside 3 tokens"),
        (lambda: one(of_tokens([0, 1], [1, -7])), r"target of token 1 \(id 1\) of sequence 0 is -7"),
        (lambda: one(of_tokens([1, -1], [0, 1])), r"token of token 1 \(id -1\) of sequence 0 is -1"),
        (one, "at least one sequence"),
        (lambda: TokenBatch((FINE,) * 3, sequences_per_unit=2), "3 sequences are no whole units of 2"),
        (
            lambda: one(FINE).packed.required("weights"),
            "the loss needs the per-token value weights, and the batch has logprobs",
        ),
        (lambda: one(FINE, of_tokens([0])), "sequence 1 and sequence 0 differ in logprobs"),
        (lambda: one(of_tokens([0]), of_tokens([0], [[1, 1]])), "sequence 1 and sequence 0 differ in targets"),
    ]
    for make, problem in cases:
        with pytest.raises(ProtocolError, match=problem):
            make()


lengths_of = st.lists(st.integers(1, 18), min_size=1, max_size=12)


@given(lengths_of, st.integers(1, 4), st.integers(1, 5), st.integers(1, 60), st.booleans())
def test_ranks_run_equally_many_micro_batches_within_the_budget_and_pairs_stay_together(
    lengths: list[int], sequences_per_unit: int, world: int, max_tokens: int, padded: bool
) -> None:
    lengths = lengths * sequences_per_unit  # a multiple
    plans = micro_batches(lengths, world, max_tokens, padded=padded, sequences_per_unit=sequences_per_unit)
    assert len({len(plan) for plan in plans}) == 1
    parts = [part for plan in plans for part in plan]
    units = [
        part[first : first + sequences_per_unit] for part in parts for first in range(0, len(part), sequences_per_unit)
    ]
    assert sorted(units) == [
        [*range(first, first + sequences_per_unit)] for first in range(0, len(lengths), sequences_per_unit)
    ]
    for part in (part for part in parts if len(part) > sequences_per_unit):
        each = [lengths[index] for index in part]
        assert (len(each) * max(each) if padded else sum(each)) <= max_tokens
    loads = [sum(lengths[index] for part in plan for index in part) for plan in plans]
    assert max(loads) - min(loads) <= max(sum(lengths[index] for index in unit) for unit in units)


def test_packing_fills_what_padding_wastes_and_a_pair_counts_as_a_whole() -> None:
    lengths = [8, 1, 1, 1, 1, 1, 1, 1, 1]
    assert micro_batches(lengths, 1, 8, padded=False) == [[[0], [1, 2, 3, 4, 5, 6, 7, 8]]]
    assert len(micro_batches([8, *[5] * 3, *[3] * 3], 1, 8, padded=True)[0]) == 6
    lengths = [1, 8, 5, 5, 2, 2]  # pairs of 9, 10 and 4 tokens
    assert micro_batches(lengths, 2, 100, padded=False, sequences_per_unit=2) == [[[2, 3]], [[0, 1, 4, 5]]]
    assert micro_batches(lengths, 1, 32, padded=True, sequences_per_unit=2) == [[[0, 1, 2, 3], [4, 5]]]
    assert micro_batches(lengths, 1, 31, padded=True, sequences_per_unit=2) == [[[0, 1], [2, 3, 4, 5]]]


shared = st.integers(0, 40)
group_of = st.tuples(shared, st.lists(st.integers(0, 9), min_size=1, max_size=7))
"""Tokens that all sequences of a group begin with, and how many follow in each."""


def grown(groups: list[tuple[int, list[int]]]) -> list[torch.Tensor]:
    """Sequences of such groups, in turn; each token tells where it is from, but all groups begin with the same ten."""
    found = []
    for number, (length, rests) in enumerate(groups):
        prefix = [min(place, 10) if place < 10 else 100 + number for place in range(length)]
        found += [prefix + [1000 + 100 * number + row] * rest for row, rest in enumerate(rests)]
    found = [tokens or [5] for tokens in found]
    return [torch.tensor(found[index]) for index in sorted(range(len(found)), key=lambda index: index * 7 % 5)]


def packed_tokens(sequences: list[torch.Tensor], chosen: list[int]) -> int:
    groups = shared_prefixes([sequences[index] for index in chosen])
    return sum(len(sequences[index]) for index in chosen) - sum(
        (len(each.members) - 1) * each.shared for each in groups
    )


@given(st.lists(group_of, min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 200))
def test_prefixes_are_those_of_their_members_and_groups_fill_micro_batches_by_what_is_computed(
    groups: list[tuple[int, list[int]]], world: int, max_tokens: int
) -> None:
    sequences = grown(groups)
    lengths = [len(each) for each in sequences]
    found = shared_prefixes(sequences)
    assert sorted(member for each in found for member in each.members) == [*range(len(sequences))]
    for each in found:
        assert len({tuple(sequences[member][: each.shared].tolist()) for member in each.members}) == 1
        assert (each.shared >= LEAST_SHARED) == (len(each.members) > 1)
    least = sum(length * (len(rests) - 1) for length, rests in groups if length >= LEAST_SHARED)
    assert packed_tokens(sequences, [*range(len(sequences))]) <= sum(lengths) - least
    plans = micro_batches(lengths, world, max_tokens, padded=False, prefixes=found)
    assert len({len(plan) for plan in plans}) == 1
    assert sorted(index for plan in plans for part in plan for index in part) == [*range(len(sequences))]
    for part in (part for plan in plans for part in plan if len(part) > 1):
        assert packed_tokens(sequences, part) <= max_tokens
    plain = micro_batches(lengths, world, 10**6, padded=False)
    whole = micro_batches(lengths, world, 10**6, padded=False, prefixes=found)
    most = [max(packed_tokens(sequences, part) for plan in each for part in plan) for each in (whole, plain)]
    assert most[0] <= max(sum(lengths[index] for index in part) for plan in plain for part in plan)
    if not any(each.shared for each in found):
        assert whole == plain


def test_groups_stay_together_unless_ranks_or_the_budget_need_a_part_of_one() -> None:
    lengths = [30] * 8
    prefixes = shared_prefixes([torch.tensor([row // 4] * 20 + [100 + row] * 10) for row in (0, 4, 1, 5, 2, 6, 3, 7)])
    assert [(each.members, each.shared) for each in prefixes] == [((0, 2, 4, 6), 20), ((1, 3, 5, 7), 20)]
    plan = {"padded": False, "prefixes": prefixes}
    assert micro_batches(lengths, 2, 60, **plan) == [[[0, 2, 4, 6]], [[1, 3, 5, 7]]]
    assert micro_batches(lengths, 1, 59, **plan) == [[[0, 4], [2, 6], [1, 5], [3, 7]]]
    assert micro_batches(lengths, 1, 80, **plan) == [[[0, 2, 4, 6], [1, 3, 5, 7]]]
    assert micro_batches(lengths, 4, 120, **plan) == [[[0, 4]], [[2, 6]], [[1, 5]], [[3, 7]]]
    pairs = {**plan, "sequences_per_unit": 2}
    alike = shared_prefixes([torch.tensor([row // 4] * 20 + [100 + row] * 10) for row in range(8)])
    assert micro_batches(lengths, 1, 60, **{**pairs, "prefixes": alike}) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert micro_batches(lengths, 1, 60, **pairs) == [[[each, each + 1] for each in (0, 2, 4, 6)]], (
        "no pair begins alike"
    )
