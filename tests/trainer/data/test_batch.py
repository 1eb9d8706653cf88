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
from weightlane.trainer.data.packing import micro_batches
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
