"""PPO's parts around a critic: advantages, returns, the critic's loss, and the policy's with an advantage for every token."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from weightlane.ckpt_engines import ProtocolError
from weightlane.trainer import explained_variance, gae, kl_penalised_rewards, value_loss, whiten
from weightlane.trainer.config import AlgorithmConfig
from weightlane.trainer.data.batch import IGNORED, MicroBatch, MiniBatch, TokenSequence
from weightlane.trainer.objectives.loss import LossSums, ModelOutputs, needed_outputs
from weightlane.trainer.objectives.named import Objective

number = st.floats(-4.0, 4.0, width=32)
steps = st.lists(st.tuples(number, number), min_size=1, max_size=7)


def doubles(values: list[float]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


# -- advantages -----------------------------------------------------------------------------------------------------------


def summed_advantages(
    rewards: list[float], values: list[float], gamma: float, lam: float, bootstrap: float
) -> list[float]:
    """Equation 16 as it stands: for each step a sum over all steps from it."""
    after = [*values[1:], bootstrap]
    deltas = [r + gamma * nxt - v for r, v, nxt in zip(rewards, values, after, strict=True)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, len(deltas))) for t in range(len(deltas))]


@given(steps, st.floats(0, 1), st.floats(0, 1), st.just(0.0) | number)
@example([(0.0, 0.5), (1.0, 0.25)], 0.0, 0.0, 2.0)
@example([(0.0, 0.5)] * 3, 1.0, 1.0, 0.0)
def test_advantages_are_the_sum_of_discounted_errors_and_returns_what_values_aim_at(
    sequence: list[tuple[float, float]], gamma: float, lam: float, bootstrap: float
) -> None:
    rewards, values = [reward for reward, _ in sequence], [value for _, value in sequence]
    advantages, returns = gae(
        doubles(rewards), doubles(values).requires_grad_(), gamma=gamma, lam=lam, bootstrap=bootstrap
    )
    assert not returns.requires_grad
    expected = summed_advantages(rewards, values, gamma, lam, bootstrap)
    assert advantages.dtype == returns.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    aims = [advantage + value for advantage, value in zip(expected, values, strict=True)]
    assert returns.tolist() == pytest.approx(aims, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("rewards", "values", "further", "problem"),
    [
        ([1.0], [1.0, 2.0], {}, r"rewards have shape \[1\], values \[2\]"),
        ([[1.0]], [[1.0]], {}, r"rewards have shape \[1, 1\]"),
        ([1.0], [1.0], {"gamma": 1.5}, "gamma is 1.5 and lam 0.95"),
        ([1.0], [1.0], {"lam": math.nan}, "gamma is 1.0 and lam nan"),
    ],
)
def test_rewards_that_do_not_fit_their_values_are_refused(
    rewards: list[float], values: list[float], further: dict[str, float], problem: str
) -> None:
    with pytest.raises(ProtocolError, match=problem):
        gae(torch.tensor(rewards), torch.tensor(values), **further)


@given(st.lists(st.tuples(number, st.booleans()), min_size=1, max_size=12))
@example([(0.1, True)] * 7)  # whose mean is rounded
def test_whitened_advantages_have_mean_zero_and_deviation_one_over_the_targets(rows: list[tuple[float, bool]]) -> None:
    counted = [value for value, target in rows if target]
    found = whiten(torch.tensor([value for value, _ in rows]), torch.tensor([target for _, target in rows])).tolist()
    for value, (given_value, target) in zip(found, rows, strict=True):
        if not target or len(set(counted)) == 1:
            assert value == 0.0
        else:
            scale = statistics.pstdev(counted) + 1e-6
            assert value == pytest.approx((given_value - statistics.fmean(counted)) / scale, rel=1e-3, abs=1e-4)


# -- the critic's loss ----------------------------------------------------------------------------------------------------

Row = tuple[list[tuple[float, float, float]], int]
"""Value, return and older value of each token of a completion, and how many leading tokens are masked."""
critics: st.SearchStrategy[list[Row]] = st.lists(
    st.lists(st.tuples(number, number, number), min_size=1, max_size=5).flatmap(
        lambda tokens: st.tuples(st.just(tokens), st.integers(0, len(tokens) - 1))
    ),
    min_size=1,
    max_size=4,
)


def critic_batch(rows: list[Row]) -> tuple[list[MicroBatch], list[torch.Tensor]]:
    """A micro-batch for each completion, and the values that a critic would return for it, in float64."""
    micros, values = [], []
    for tokens, masked in rows:
        given_values = {"returns": [row[1] for row in tokens], "old_values": [row[2] for row in tokens]}
        sequence = TokenSequence.of_completion([1, 2], [3] * len(tokens), masked=masked, per_token=given_values)
        micro = MicroBatch.of([sequence])
        object.__setattr__(micro, "per_token", {name: each.double() for name, each in micro.per_token.items()})
        micros.append(micro)
        values.append(doubles([55.0, *(row[0] for row in tokens)]).requires_grad_())  # junk where nothing is predicted
    return micros, values


@pytest.mark.parametrize("clip", [None, 0.5])
@given(critics)
@example([([(2.0, 1.0, 0.0), (-2.0, 1.0, 0.0), (0.25, 3.0, 0.0), (1.5, 1.5, 0.5)], 1)])
def test_the_critics_loss_is_the_clipped_squared_error_value_gradient_and_metrics(
    clip: float | None, rows: list[Row]
) -> None:
    loss = value_loss(AlgorithmConfig(value_clip=clip))
    assert needed_outputs(loss) == ("values",)
    micros, values = critic_batch(rows)
    counted = [row for tokens, masked in rows for row in tokens[masked:]]
    sums = LossSums(MiniBatch(len(counted), len(rows)))
    for micro, each in zip(micros, values, strict=True):
        torch.autograd.backward(sums.add(loss(ModelOutputs(values=each), micro)))
    expected, slopes, stopped = 0.0, [], 0
    for value, wanted, old in counted:
        plain, bounded = (value - wanted) ** 2, -1.0
        if clip is not None and abs(value - old) > clip:
            bounded = (old + math.copysign(clip, value - old) - wanted) ** 2
        expected += max(plain, bounded) / 2 / len(counted)
        stopped += bounded > plain
        share = 0.0 if bounded > plain else 0.5 if bounded == plain else 1.0
        slopes.append(share * (value - wanted) / len(counted))
    found = sums.named(sums.as_tensor(), len(counted))
    assert found["loss"] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    slope_of = [slope for micro, each in zip(micros, values, strict=True) for slope in each.grad[micro.mask].tolist()]
    assert slope_of == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    assert not any(bool(each.grad[~micro.mask].any()) for micro, each in zip(micros, values, strict=True))
    assert found["value"] == pytest.approx(statistics.fmean(row[0] for row in counted), abs=1e-9)
    assert found["value_clip_fraction"] * len(counted) == pytest.approx(stopped)
    returns = [row[1] for row in counted]
    if statistics.pvariance(returns) > 1e-3:
        left = statistics.pvariance([row[1] - row[0] for row in counted])
        assert explained_variance(found) == pytest.approx(1 - left / statistics.pvariance(returns), rel=1e-6, abs=1e-6)


def test_equal_returns_have_no_variance_to_explain() -> None:
    means = {"return": 2.0, "return_square": 4.0, "value_error": 1.0, "value_error_square": 1.0}
    assert math.isnan(explained_variance(means))


def test_a_critic_without_its_values_is_refused_by_name() -> None:
    bare = MicroBatch.of([TokenSequence.of_completion([1], [2], per_token={"returns": 1.0})])
    with pytest.raises(ProtocolError, match="needs the per-token value old_values, and the batch has returns"):
        value_loss(AlgorithmConfig(value_clip=0.2))(ModelOutputs.nothing(bare, 1), bare)
    with pytest.raises(ValidationError, match="value_clip"):
        AlgorithmConfig(value_clip=0.0)


# -- the policy's loss ----------------------------------------------------------------------------------------------------


def test_ppo_weighs_every_token_by_its_own_advantage_from_rewards_to_gradient() -> None:
    """A truncated completion of three tokens, the first of which is no target, worked out by hand."""
    policy, rollout, reference = [-1.0, -0.5, -2.0], [-1.0, -1.5, -1.9], [-1.0, -1.0, -1.5]
    rewards = kl_penalised_rewards(1.0, doubles(rollout[1:]), doubles(reference[1:]), coefficient=0.5)
    assert rewards.tolist() == pytest.approx([0.25, 0.2 + 1.0])  # -0.5 * (-1.5 + 1.0), -0.5 * (-1.9 + 1.5) + 1
    advantages, _ = gae(rewards, torch.tensor([1.0, 0.5]), gamma=0.5, lam=0.5, bootstrap=-4.0)
    second = 1.2 + 0.5 * -4.0 - 0.5
    first = 0.25 + 0.5 * 0.5 - 1.0 + 0.25 * second
    assert advantages.tolist() == pytest.approx([first, second])
    sequence = TokenSequence.of_completion(
        [7, 8], [9] * 3, masked=1, per_token={"rollout_logprobs": rollout, "advantages": [99.0, *advantages.tolist()]}
    )
    assert sequence.targets.tolist() == [IGNORED, IGNORED, 9, 9]
    logprobs = torch.tensor([0.0, *policy], requires_grad=True)
    found = Objective(AlgorithmConfig(objective="ppo", clip_low=0.2, clip_high=0.3))(
        ModelOutputs(logprobs), MicroBatch.of([sequence])
    )
    found.terms["policy"].divided(MiniBatch(2, 1)).backward()
    ratios = [
        math.exp(1.0),
        math.exp(-0.1),
    ]  # the first is above the clip, which keeps a gradient for a negative advantage
    assert first < 0 > second
    total = -ratios[0] * first - ratios[1] * second
    assert float(found.terms["policy"].total.detach()) == pytest.approx(total, rel=1e-6)
    assert logprobs.grad.tolist() == pytest.approx([0, 0, -ratios[0] * first / 2, -ratios[1] * second / 2], rel=1e-6)
