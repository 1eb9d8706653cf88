"""Losses and advantages against plain Python on single numbers."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from weightlane.trainer.config import AlgorithmConfig
from weightlane.trainer.data.batch import MicroBatch, Sample
from weightlane.trainer.objectives.losses import group_advantages, grpo_loss, sft_loss, token_logprobs

logprob = st.floats(-30.0, 0.0, width=32)
token = st.tuples(logprob, logprob)
rows = st.lists(
    st.tuples(st.lists(token, min_size=1, max_size=5), st.floats(-3.0, 3.0, width=32)), min_size=1, max_size=4
)


def micro_of(samples: list[Sample], logprobs: list[list[float]]) -> tuple[MicroBatch, torch.Tensor]:
    """The padded micro batch and the policy's log-probabilities laid out over it, junk outside the completions."""
    micro = MicroBatch.from_samples(samples)
    tensor = torch.full(micro.loss_mask.shape, -7.0)
    for row, values in enumerate(logprobs):
        tensor[row, micro.loss_mask[row]] = torch.tensor(values)
    return micro, tensor.requires_grad_()


def plain_grpo(logp: float, rollout: float, advantage: float, config: AlgorithmConfig) -> float:
    ratio = math.exp(logp - rollout)
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    return -min(min(ratio, config.ratio_cap) * advantage, clipped * advantage)


@settings(max_examples=60, deadline=None)
@given(rows, st.sampled_from([(0.2, 0.28, 2.0), (0.1, 0.1, 1.5), (0.9, 4.0, 5.0)]))
def test_grpo_sums_the_formula_over_completion_tokens(
    data: list[tuple[list[tuple[float, float]], float]], bounds: tuple[float, float, float]
) -> None:
    config = AlgorithmConfig(clip_low=bounds[0], clip_high=bounds[1], ratio_cap=bounds[2])
    samples = [
        Sample((1,) * (index % 3 + 1), (2,) * len(tokens), tuple(rollout for _, rollout in tokens), advantage)
        for index, (tokens, advantage) in enumerate(data)
    ]
    micro, logprobs = micro_of(samples, [[logp for logp, _ in tokens] for tokens, _ in data])
    output = grpo_loss(config)(logprobs, micro)
    expected = [plain_grpo(logp, rollout, advantage, config) for tokens, advantage in data for logp, rollout in tokens]
    assert float(output.loss_sum.detach()) == pytest.approx(math.fsum(expected), rel=1e-4, abs=1e-4)
    ratios = [math.exp(logp - rollout) for tokens, _ in data for logp, rollout in tokens]
    assert float(output.metric_sums["ratio"]) == pytest.approx(
        math.fsum(min(ratio, config.ratio_cap) for ratio in ratios), rel=1e-4
    )
    assert float(output.metric_sums["entropy"]) == pytest.approx(
        -math.fsum(logp for tokens, _ in data for logp, _ in tokens), rel=1e-4, abs=1e-4
    )
    torch.autograd.backward(output.loss_sum)
    assert logprobs.grad is not None
    assert bool(torch.isfinite(logprobs.grad).all())
    assert bool((logprobs.grad[~micro.loss_mask] == 0).all())


@pytest.mark.parametrize(
    ("ratio", "advantage", "factor"),
    [
        (1.0, 1.0, 1.0),  # on policy: the plain policy gradient
        (1.2, 1.0, 1.2),
        (1.4, 1.0, 0.0),  # good and already likely: clipped above
        (0.5, 1.0, 0.5),  # good and unlikely: never clipped
        (0.7, -1.0, 0.0),  # bad and already unlikely: clipped below
        (1.9, -1.0, 1.9),  # bad and likely: pushed down with its whole weight
        (5.0, -1.0, 0.0),  # ... but for the truncation
        (1.4, 0.0, 0.0),
    ],
)
def test_gradient_clip_fraction_and_kl_in_every_region(ratio: float, advantage: float, factor: float) -> None:
    sample = Sample((1,), (2,), (-2.0,), advantage)
    micro, logprobs = micro_of([sample], [[-2.0 + math.log(ratio)]])
    output = grpo_loss(AlgorithmConfig())(logprobs, micro)
    torch.autograd.backward(output.loss_sum)
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(-factor * advantage, abs=1e-6)
    assert float(output.metric_sums["clip_fraction"]) == float(factor == 0.0 and advantage != 0.0)
    assert float(output.metric_sums["approx_kl"]) == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-5, abs=1e-6)


def test_a_ratio_too_large_for_float32_gives_finite_loss_and_metrics() -> None:
    micro, logprobs = micro_of([Sample((1,), (2,), (-500.0,), -1.0)], [[-0.5]])
    output = grpo_loss(AlgorithmConfig())(logprobs, micro)
    assert float(output.loss_sum.detach()) == pytest.approx(2.0)
    assert all(math.isfinite(float(value)) for value in output.metric_sums.values())


def test_supervised_loss_is_the_negative_log_likelihood_of_the_completion() -> None:
    samples = [Sample.supervised([1, 2], [3, 4]), Sample.supervised([1], [5])]
    micro, logprobs = micro_of(samples, [[-1.0, -2.0], [-4.0]])
    assert float(sft_loss()(logprobs, micro).loss_sum.detach()) == 7.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_token_logprobs_are_a_float32_log_softmax_of_the_scaled_logits(dtype: torch.dtype, temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 11).mul(20).to(dtype)
    targets = torch.randint(11, (2, 3))
    found = token_logprobs(logits, targets, temperature)
    exact = torch.log_softmax(logits.double() / temperature, -1)
    assert found.dtype == torch.float32
    wanted = [float(exact[row, place, targets[row, place]]) for row in range(2) for place in range(3)]
    assert found.flatten().tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 6).flatmap(lambda size: st.lists(
    st.lists(st.floats(-10, 10, width=32), min_size=size, max_size=size), min_size=1, max_size=4)), st.booleans())  # fmt: skip
def test_advantages_are_centred_and_scaled_within_each_group(groups: list[list[float]], scaled: bool) -> None:
    found = group_advantages(torch.tensor(groups, dtype=torch.float64), normalize_std=scaled)
    assert found.dtype == torch.float32
    for row, rewards in zip(found.tolist(), groups, strict=True):
        mean, scale = statistics.fmean(rewards), statistics.pstdev(rewards) + 1e-6 if scaled else 1.0
        expected = [0.0] * len(rewards) if len(set(rewards)) == 1 else [(r - mean) / scale for r in rewards]
        assert row == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_a_group_of_equal_rewards_teaches_nothing_even_when_their_mean_is_rounded() -> None:
    assert group_advantages(torch.full((1, 7), 0.1)).tolist() == [[0.0] * 7]


def test_a_cap_inside_the_clip_range_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"ratio_cap \(1.1\) must be at least 1 \+ clip_high \(1.28\)"):
        AlgorithmConfig(ratio_cap=1.1)
