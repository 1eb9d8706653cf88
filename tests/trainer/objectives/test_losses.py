"""Division and report of a loss function's sums; supervised losses; advantages."""

from __future__ import annotations

import statistics

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from weightlane.trainer.data.batch import MicroBatch, MiniBatch, TokenSequence
from weightlane.trainer.objectives.advantages import group_advantages
from weightlane.trainer.objectives.loss import LossOutput, LossSums, LossTerm, ModelOutputs, needed_outputs, needs
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
    sums = LossSums(MiniBatch(tokens=10, sequences=4))
    for scale in (1.0, 2.0):
        value = torch.tensor(scale)
        terms = {"policy": LossTerm(value), "kl": LossTerm(value, "sequences"), "extra": LossTerm(value, 8.0)}
        part = sums.add(LossOutput(terms, {"ratio": torch.tensor(6.0), "margin": LossTerm(value, "sequences")}))
        assert float(part) == pytest.approx(scale * (1 / 10 + 1 / 4 + 1 / 8))
    found = sums.named(sums.as_tensor(), target_tokens=6)
    wanted = {"loss/policy": 0.3, "loss/kl": 0.75, "loss/extra": 0.375, "margin": 0.75, "ratio": 2.0, "tokens": 6.0}
    assert found == pytest.approx({"loss": 1.425, **wanted})


def test_a_loss_that_needs_more_than_log_probabilities_says_so() -> None:
    @needs("logprobs", "entropy")
    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        return LossOutput({"entropy": LossTerm(-outputs.required("entropy").sum())})

    assert (needed_outputs(loss), needed_outputs(sft)) == (("logprobs", "entropy"), ("logprobs",))
    with pytest.raises(KeyError, match=r"decorate it with needs\('entropy'\)"):
        ModelOutputs(torch.zeros(1)).required("entropy")


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
