"""KL to a reference policy and the entropy bonus: estimators, the terms that are added to any objective, and rewards."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from loss_batches import at_targets, completion, in_float64, slopes_at_targets

from weightlane.ckpt_engines import ProtocolError
from weightlane.trainer import kl_penalised_rewards
from weightlane.trainer.config import AlgorithmConfig
from weightlane.trainer.data.batch import MicroBatch, MiniBatch
from weightlane.trainer.objectives.loss import LossSums, ModelOutputs
from weightlane.trainer.objectives.named import BUILT_IN, Objective

estimators: st.SearchStrategy[Any] = st.sampled_from(["k1", "k2", "k3"])
logprob = st.floats(-6.0, -0.0078125, width=32) | st.floats(-80.0, -0.0078125, width=32)
Row = tuple[list[tuple[float, float, float]], int]
"""Log-probability now and in the reference, and entropy, of each token; and how many leading tokens are masked."""
rows_of: st.SearchStrategy[list[Row]] = st.lists(
    st.lists(st.tuples(logprob, logprob, st.floats(0, 5, width=32)), min_size=1, max_size=5).flatmap(
        lambda tokens: st.tuples(st.just(tokens), st.integers(0, len(tokens) - 1))
    ),
    min_size=1,
    max_size=4,
)


def estimated(now: float, reference: float, estimator: str) -> tuple[float, float]:
    """An estimate and its derivative by the policy's log-probability."""
    x = now - reference
    if estimator == "k1":
        return x, 1.0
    if estimator == "k2":
        return x * x / 2, x
    if -x > 20.0:
        return math.exp(20.0) - 1 - 20.0, 0.0
    return math.exp(-x) - 1 + x, 1 - math.exp(-x)


FAR_APART: list[Row] = [
    ([(-0.0078125, -70.0, 1.0), (-70.0, -0.0078125, 2.0), (-2.0, -2.0, 0.0)], 0),
    ([(-3.0, -1.0, 1.0)] * 3, 2),
]


@given(estimators, st.sampled_from(sorted(BUILT_IN)), rows_of)
@example("k1", "ppo", FAR_APART)
@example("k2", "gspo", FAR_APART)
@example("k3", "grpo", FAR_APART)
def test_kl_and_entropy_are_means_over_tokens_beside_every_objective_value_and_gradient(
    estimator: Any, name: str, rows: list[Row]
) -> None:
    """Advantages are 0, so that all of the gradient is that of the terms; every completion is a micro-batch of its own."""
    config = AlgorithmConfig(objective=name, kl_coefficient=0.3, kl_estimator=estimator, entropy_coefficient=0.2)
    objective = Objective(config)
    assert objective.needs == ("logprobs", "entropy")
    counted = [token for tokens, masked in rows for token in tokens[masked:]]
    sums, slopes, pulls = LossSums(MiniBatch(len(counted), len(rows))), [], []
    for tokens, masked in rows:
        values = {"reference_logprobs": [token[1] for token in tokens], "rollout_logprobs": -2.0, "advantages": 0.0}
        micro = in_float64(MicroBatch.of([completion(len(tokens), masked, **values)]))
        logprobs = at_targets(micro, [token[0] for token in tokens[masked:]])
        entropy = at_targets(micro, [token[2] for token in tokens[masked:]])
        torch.autograd.backward(sums.add(objective(ModelOutputs(logprobs, entropy), micro)))
        slopes += slopes_at_targets(logprobs, micro)
        pulls += slopes_at_targets(entropy, micro)
    found = sums.named(sums.as_tensor(), len(counted))
    each = [estimated(now, reference, estimator) for now, reference, _ in counted]
    kl = 0.3 * math.fsum(value for value, _ in each) / len(counted)
    bonus = -0.2 * math.fsum(entropy for _, _, entropy in counted) / len(counted)
    assert found["loss/reference_kl"] == pytest.approx(kl, rel=1e-9, abs=1e-12)
    assert found["loss/entropy_bonus"] == pytest.approx(bonus, rel=1e-9, abs=1e-12)
    assert slopes == pytest.approx([0.3 * slope / len(counted) for _, slope in each], rel=1e-9, abs=1e-12)
    assert pulls == pytest.approx([-0.2 / len(counted)] * len(counted))
    k3 = math.fsum(estimated(now, reference, "k3")[0] for now, reference, _ in counted) / len(counted)
    assert found["reference_kl"] == pytest.approx(k3, rel=1e-9, abs=1e-12)


def test_what_has_no_reference_for_every_token_is_refused_by_name() -> None:
    for policy, reference in ((torch.zeros(0), torch.zeros(0)), (torch.zeros(2), torch.zeros(3))):
        with pytest.raises(ProtocolError, match="Give one of each for every target of one completion"):
            kl_penalised_rewards(1.0, policy, reference, coefficient=0.1)
    micro = MicroBatch.of([completion(1, rollout_logprobs=-1.0, advantages=1.0)])
    objective = Objective(AlgorithmConfig(objective="grpo", kl_coefficient=0.1))
    with pytest.raises(ProtocolError, match="the loss needs the per-token value reference_logprobs, and the batch has"):
        objective(ModelOutputs.nothing(micro, 1), micro)
