"""Division and report of a loss function's sums; supervised losses; advantages; the loss of a critic."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from loss_batches import at_targets, completion, in_float64, slopes_at_targets

from weightlane.ckpt_engines import ProtocolError
from weightlane.trainer import explained_variance, gae, value_loss, whiten
from weightlane.trainer.data.batch import LossDenominators
from weightlane.trainer.data.sequences import MicroBatch, TokenSequence
from weightlane.trainer.objectives.advantages import group_advantages
from weightlane.trainer.objectives.config import AlgorithmConfig
from weightlane.trainer.objectives.loss import LossOutput, LossSums, LossTerm, ModelOutputs, needed_outputs
from weightlane.trainer.objectives.supervised import sft


def test_supervised_loss_is_the_negative_log_likelihood_of_the_targets_by_weight() -> None:
    sequences = [
        TokenSequence.of_completion([1, 2], [3, 4], per_token={"weights": [1.0, 0.5]}),
        TokenSequence.of_completion([1], [5], per_token={"weights": 2.0}),
    ]
    logprobs = ModelOutputs(torch.tensor([-9.0, -1.0, -2.0, -4.0]))
    weighted = sft(logprobs, MicroBatch.of(sequences)).terms["nll"]
    assert (float(weighted.total), weighted.mean_over) == (1.0 + 1.0 + 8.0, "tokens")
    plain = [TokenSequence(each.tokens, each.targets) for each in sequences]
    assert float(sft(logprobs, MicroBatch.of(plain)).terms["nll"].total) == 7.0


def test_terms_are_divided_by_what_they_say_and_metrics_by_targets() -> None:
    sums = LossSums(LossDenominators(tokens=10, sequences=4))
    for scale in (1.0, 2.0):
        value = torch.tensor(scale)
        terms = {"policy": LossTerm(value), "kl": LossTerm(value, "sequences"), "extra": LossTerm(value, 8.0)}
        part = sums.add(LossOutput(terms, {"ratio": torch.tensor(6.0), "margin": LossTerm(value, "sequences")}))
        assert float(part) == pytest.approx(scale * (1 / 10 + 1 / 4 + 1 / 8))
    found = sums.named(sums.as_tensor(), target_tokens=6)
    wanted = {"loss/policy": 0.3, "loss/kl": 0.75, "loss/extra": 0.375, "margin": 0.75, "ratio": 2.0, "tokens": 6.0}
    assert found == pytest.approx({"loss": 1.425, **wanted})


rewards_of_groups: st.SearchStrategy[list[list[float]]] = st.integers(2, 6).flatmap(
    lambda size: st.lists(st.lists(st.floats(-10, 10, width=32), min_size=size, max_size=size), min_size=1, max_size=4)
)


@given(rewards_of_groups, st.booleans())
@example([[0.1] * 7], True)  # whose mean is rounded
def test_advantages_are_centred_and_scaled_within_each_group(groups: list[list[float]], scaled: bool) -> None:
    found = group_advantages(torch.tensor(groups, dtype=torch.float64), normalize_std=scaled)
    assert found.dtype == torch.float32
    for row, rewards in zip(found.tolist(), groups, strict=True):
        mean, scale = statistics.fmean(rewards), statistics.pstdev(rewards) + 1e-6 if scaled else 1.0
        if len(set(rewards)) == 1:
            assert row == [0.0] * len(rewards)
        else:
            assert row == pytest.approx([(reward - mean) / scale for reward in rewards], rel=1e-4, abs=1e-6)


# -- a critic ----------------------------------------------------------------------------------------------------------------


number = st.floats(-4.0, 4.0, width=32)
steps = st.lists(st.tuples(number, number), min_size=1, max_size=7)


@given(steps, st.floats(0, 1), st.floats(0, 1), st.just(0.0) | number)
@example([(0.0, 0.5), (1.0, 0.25)], 0.0, 0.0, 2.0)
@example([(0.0, 0.5)] * 3, 1.0, 1.0, 0.0)
def test_advantages_are_the_sum_of_discounted_errors_and_returns_what_values_aim_at(
    sequence: list[tuple[float, float]], gamma: float, lam: float, bootstrap: float
) -> None:
    """Equation 16 of the paper: for each step, a sum over all steps from it."""
    rewards, values = (torch.tensor(each, dtype=torch.float64) for each in zip(*sequence, strict=True))
    advantages, returns = gae(rewards, values.requires_grad_(), gamma=gamma, lam=lam, bootstrap=bootstrap)
    following = [*(value for _, value in sequence[1:]), bootstrap]
    errors = [reward + gamma * after - value for (reward, value), after in zip(sequence, following, strict=True)]
    expected = [
        sum((gamma * lam) ** (later - step) * errors[later] for later in range(step, len(errors)))
        for step in range(len(errors))
    ]
    assert not returns.requires_grad
    assert advantages.dtype == returns.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5)
    aims = [advantage + value for advantage, (_, value) in zip(expected, sequence, strict=True)]
    assert returns.tolist() == pytest.approx(aims, rel=1e-5, abs=1e-5)


def test_rewards_that_do_not_fit_their_values_are_refused() -> None:
    for rewards, values, further, problem in (
        ([1.0], [1.0, 2.0], {}, r"rewards have shape \[1\], values \[2\]"),
        ([[1.0]], [[1.0]], {}, r"rewards have shape \[1, 1\]"),
        ([1.0], [1.0], {"gamma": 1.5}, "gamma is 1.5 and lam 0.95"),
        ([1.0], [1.0], {"lam": math.nan}, "gamma is 1.0 and lam nan"),
    ):
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


Row = tuple[list[tuple[float, float, float]], int]
"""Value, return and older value of each token of a completion, and how many leading tokens are masked."""
critics: st.SearchStrategy[list[Row]] = st.lists(
    st.lists(st.tuples(number, number, number), min_size=1, max_size=5).flatmap(
        lambda tokens: st.tuples(st.just(tokens), st.integers(0, len(tokens) - 1))
    ),
    min_size=1,
    max_size=4,
)


@given(critics, st.none() | st.just(0.5))
@example([([(2.0, 1.0, 0.0), (-2.0, 1.0, 0.0), (0.25, 3.0, 0.0), (1.5, 1.5, 0.5)], 1)], 0.5)
def test_the_critics_loss_is_the_clipped_squared_error_value_gradient_and_metrics(
    rows: list[Row], clip: float | None
) -> None:
    """Every completion is a micro-batch of its own."""
    loss = value_loss(AlgorithmConfig(value_clip=clip))
    assert needed_outputs(loss) == ("values",)
    counted = [row for tokens, masked in rows for row in tokens[masked:]]
    sums, found_slopes = LossSums(LossDenominators(len(counted), len(rows))), []
    for tokens, masked in rows:
        given_values = {"returns": [row[1] for row in tokens], "old_values": [row[2] for row in tokens]}
        micro = in_float64(MicroBatch.of([completion(len(tokens), masked, **given_values)]))
        values = at_targets(micro, [row[0] for row in tokens[masked:]], elsewhere=55.0)
        torch.autograd.backward(sums.add(loss(ModelOutputs(values=values), micro)))
        found_slopes += slopes_at_targets(values, micro)
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
    assert found_slopes == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    assert found["value"] == pytest.approx(statistics.fmean(row[0] for row in counted), abs=1e-9)
    assert found["value_clip_fraction"] * len(counted) == pytest.approx(stopped)
    variance = statistics.pvariance([row[1] for row in counted])
    if variance > 1e-3:
        left = statistics.pvariance([row[1] - row[0] for row in counted])
        assert explained_variance(found) == pytest.approx(1 - left / variance, rel=1e-6, abs=1e-6)
