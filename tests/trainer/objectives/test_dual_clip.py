"""The dual-clip loss against plain Python on single numbers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from weightlane.trainer.config import AlgorithmConfig
from weightlane.trainer.data.batch import MicroBatch, MiniBatch, TokenSequence
from weightlane.trainer.objectives.loss import LossOutput, ModelOutputs
from weightlane.trainer.objectives.policy.dual_clip import dual_clip

logprob = st.floats(-30.0, 0.0, width=32)
token = st.tuples(logprob, logprob)
rows = st.lists(
    st.tuples(st.lists(token, min_size=1, max_size=5), st.floats(-3.0, 3.0, width=32)), min_size=1, max_size=4
)


def judged(
    sequences: list[TokenSequence], logprobs: list[list[float]], config: AlgorithmConfig
) -> tuple[LossOutput, torch.Tensor, MicroBatch]:
    """The loss of a packed micro-batch, the policy's log-probabilities laid out over it, with junk where nothing is predicted."""
    micro = MicroBatch.of(sequences)
    tensor = torch.full(micro.targets.shape, -7.0)
    tensor[micro.mask] = torch.tensor([value for values in logprobs for value in values])
    tensor.requires_grad_()
    return dual_clip(config)(ModelOutputs(tensor), micro), tensor, micro


def of_ratio(ratio: float, advantage: float, rollout: float = -2.0) -> tuple[LossOutput, torch.Tensor]:
    """The loss of one token."""
    values = {"rollout_logprobs": rollout, "advantages": advantage}
    sequence = TokenSequence.of_completion([1], [2], per_token=values)
    output, logprobs, _ = judged([sequence], [[rollout + math.log(ratio)]], AlgorithmConfig())
    return output, logprobs


def total(output: LossOutput) -> torch.Tensor:
    (term,) = output.terms.values()
    assert term.mean_over == "tokens"
    return term.total


def plain_loss(logp: float, rollout: float, advantage: float, config: AlgorithmConfig) -> float:
    ratio = math.exp(logp - rollout)
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    return -min(min(ratio, config.ratio_cap) * advantage, clipped * advantage)


@settings(max_examples=60, deadline=None)
@given(rows, st.sampled_from([(0.2, 0.28, 2.0), (0.1, 0.1, 1.5), (0.9, 4.0, 5.0)]))
def test_the_loss_sums_the_formula_over_completion_tokens(
    data: list[tuple[list[tuple[float, float]], float]], bounds: tuple[float, float, float]
) -> None:
    config = AlgorithmConfig(clip_low=bounds[0], clip_high=bounds[1], ratio_cap=bounds[2])
    sequences = [
        TokenSequence.of_completion(
            [1] * (index % 3 + 1),
            [2] * len(tokens),
            per_token={"rollout_logprobs": [rollout for _, rollout in tokens], "advantages": advantage},
        )
        for index, (tokens, advantage) in enumerate(data)
    ]
    output, logprobs, micro = judged(sequences, [[logp for logp, _ in tokens] for tokens, _ in data], config)
    expected = [plain_loss(logp, rollout, advantage, config) for tokens, advantage in data for logp, rollout in tokens]
    assert float(total(output).detach()) == pytest.approx(math.fsum(expected), rel=1e-4, abs=1e-4)
    ratios = [math.exp(logp - rollout) for tokens, _ in data for logp, rollout in tokens]
    assert float(output.metrics["ratio"]) == pytest.approx(
        math.fsum(min(ratio, config.ratio_cap) for ratio in ratios), rel=1e-4
    )
    assert float(output.metrics["entropy"]) == pytest.approx(
        -math.fsum(logp for tokens, _ in data for logp, _ in tokens), rel=1e-4, abs=1e-4
    )
    torch.autograd.backward(total(output))
    assert logprobs.grad is not None
    assert bool(torch.isfinite(logprobs.grad).all())
    assert bool((logprobs.grad[~micro.mask] == 0).all())


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
    output, logprobs = of_ratio(ratio, advantage)
    torch.autograd.backward(total(output))
    assert logprobs.grad is not None
    assert float(logprobs.grad) == pytest.approx(-factor * advantage, abs=1e-6)
    assert float(output.metrics["clip_fraction"]) == float(factor == 0.0 and advantage != 0.0)
    assert float(output.metrics["approx_kl"]) == pytest.approx(ratio - 1 - math.log(ratio), rel=1e-5, abs=1e-6)


def test_a_ratio_too_large_for_float32_gives_finite_loss_and_metrics() -> None:
    output, _ = of_ratio(math.exp(499.5), -1.0, rollout=-500.0)
    assert float(total(output).detach()) == pytest.approx(2.0)
    assert all(math.isfinite(float(value)) for value in output.metrics.values())


def test_a_micro_batch_without_targets_has_the_same_sums_and_all_are_zero() -> None:
    values = {"rollout_logprobs": -1.0, "advantages": 1.0}
    empty = MicroBatch.without_targets(TokenSequence.of_completion([1], [2], per_token=values))
    found, like = dual_clip(AlgorithmConfig())(ModelOutputs.nothing(empty, 1), empty), of_ratio(1.0, 1.0)[0]
    assert (list(found.terms), list(found.metrics)) == (list(like.terms), list(like.metrics))
    assert float(total(found)) == 0.0
    assert [float(value) for value in found.metrics.values()] == [0.0] * len(found.metrics)
    assert float(found.terms["policy"].divided(MiniBatch(0, 0))) == 0.0


def test_a_cap_inside_the_clip_range_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"ratio_cap \(1.1\) must be at least 1 \+ clip_high \(1.28\)"):
        AlgorithmConfig(ratio_cap=1.1)
