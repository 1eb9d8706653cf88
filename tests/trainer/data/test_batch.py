"""Samples, their split over ranks, and padded micro batches."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane.ckpt_engines import ProtocolError
from weightlane.trainer.data.batch import MicroBatch, Sample, TrainBatch

ids = st.lists(st.integers(0, 99), min_size=1, max_size=9).map(tuple)
samples = st.builds(
    lambda prompt, completion, advantage: Sample(prompt, completion, tuple(-0.5 - i for i in completion), advantage),
    ids,
    ids,
    st.floats(-2, 2, width=32),
)
batches = st.lists(samples, min_size=1, max_size=12).map(lambda found: TrainBatch(tuple(found)))


@settings(max_examples=80, deadline=None)
@given(batches, st.integers(1, 5))
def test_every_sample_goes_to_exactly_one_rank_and_loads_are_balanced(batch: TrainBatch, world: int) -> None:
    shares = batch.split(world)
    assert Counter(sample for share in shares for sample in share) == Counter(batch.samples)
    loads = [sum(sample.length for sample in share) for share in shares]
    assert max(loads) - min(loads) <= max(sample.length for sample in batch.samples)
    assert shares == TrainBatch(batch.samples).split(world)


@settings(max_examples=80, deadline=None)
@given(batches, st.integers(1, 4), st.integers(1, 60))
def test_ranks_run_equally_many_micro_batches_that_hold_every_token_once(
    batch: TrainBatch, world: int, max_tokens: int
) -> None:
    plans = [batch.micro_batches(rank, world, max_tokens) for rank in range(world)]
    assert len({len(plan) for plan in plans}) == 1
    tokens = Counter()  # type: Counter[tuple[int, float, float]]
    for micro in (micro for plan in plans for micro in plan):
        rows, length = micro.input_ids.shape
        assert rows == 1 or rows * length <= max_tokens
        assert micro.targets.shape == micro.loss_mask.shape == micro.rollout_logprobs.shape == micro.advantages.shape
        mask = micro.loss_mask
        parts = (micro.targets, micro.rollout_logprobs, micro.advantages)
        tokens.update(zip(*(part[mask].tolist() for part in parts), strict=True))
        assert bool((micro.rollout_logprobs[~mask] == 0).all())
    expected = Counter(
        (token, logprob, sample.advantage)
        for sample in batch.samples
        for token, logprob in zip(sample.completion_ids, sample.rollout_logprobs, strict=True)
    )
    assert tokens == expected
    assert tokens.total() == batch.loss_tokens


def test_sequences_are_padded_on_the_right_and_targets_begin_at_the_first_completion() -> None:
    micro = MicroBatch.from_samples(
        [Sample((1, 2), (3,), (-0.1,), 2.0), Sample((4,), (5, 6, 7), (-1.0, -2.0, -3.0), -1.0)]
    )
    assert micro.input_ids.tolist() == [[1, 2, 3, 0], [4, 5, 6, 7]]
    assert micro.attention_mask.tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert micro.first_target == 1
    assert micro.targets.tolist() == [[2, 3, 0], [5, 6, 7]]
    assert micro.loss_mask.tolist() == [[False, True, False], [True, True, True]]
    torch.testing.assert_close(micro.rollout_logprobs, torch.tensor([[0.0, -0.1, 0.0], [-1.0, -2.0, -3.0]]))
    assert micro.advantages.tolist() == [[0.0, 2.0, 0.0], [-1.0, -1.0, -1.0]]


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        *((((1,), (8, 9), (-1.0, x), 0.0), rf"token 1 \(id 9\) is {x}") for x in (math.nan, math.inf, -math.inf)),
        (((1,), (2,), (-1.0,), math.nan), "advantage nan"),
        (((1,), (2, 3), (-1.0,), 0.0), "2 completion tokens came with 1 log-probabilities"),
        (((), (2,), (-1.0,), 0.0), "at least one prompt token and one completion token"),
        (((1,), (), (), 0.0), "at least one prompt token and one completion token"),
    ],
)
def test_a_malformed_sample_is_refused_by_name(sample: tuple[Any, ...], problem: str) -> None:
    with pytest.raises(ProtocolError, match=problem):
        Sample(*sample)


def test_a_batch_of_no_samples_is_refused() -> None:
    with pytest.raises(ProtocolError, match="at least one sample"):
        TrainBatch(())
