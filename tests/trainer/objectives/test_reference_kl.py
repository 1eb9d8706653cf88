"""KL to a reference policy and the entropy bonus: estimators, the terms that are added to any objective, and rewards."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from weightlane.ckpt_engines import ProtocolError
from weightlane.trainer import kl_estimate, kl_penalised_rewards
from weightlane.trainer.config import AlgorithmConfig
from weightlane.trainer.data.batch import MicroBatch, MiniBatch, TokenSequence
from weightlane.trainer.objectives.loss import LossSums, ModelOutputs
from weightlane.trainer.objectives.named import BUILT_IN, Objective

ESTIMATORS: list[Any] = ["k1", "k2", "k3"]
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


def packed(rows: list[Row], **further: float) -> tuple[MicroBatch, torch.Tensor, torch.Tensor]:
    """Completions, a policy's log-probabilities of them and its entropies, in float64."""
    micro = MicroBatch.of(
        [
            TokenSequence.of_completion(
                [1, 2],
                [3] * len(tokens),
                masked=masked,
                per_token={"reference_logprobs": [token[1] for token in tokens], **further},
            )
            for tokens, masked in rows
        ]
    )
    object.__setattr__(micro, "per_token", {name: each.double() for name, each in micro.per_token.items()})
    laid = [torch.zeros(micro.targets.shape, dtype=torch.float64) for _ in range(2)]
    for place, tensor in zip((0, 2), laid, strict=True):
        tensor[micro.mask] = torch.tensor(
            [token[place] for tokens, masked in rows for token in tokens[masked:]], dtype=torch.float64
        )
    return micro, laid[0].requires_grad_(), laid[1].requires_grad_()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("name", BUILT_IN)
@settings(max_examples=15, deadline=None)
@given(rows_of)
@example([([(-0.0078125, -70.0, 1.0), (-70.0, -0.0078125, 2.0), (-2.0, -2.0, 0.0)], 0), ([(-3.0, -1.0, 1.0)] * 3, 2)])
def test_kl_and_entropy_are_means_over_tokens_beside_every_objective_value_and_gradient(
    name: str, estimator: Any, rows: list[Row]
) -> None:
    """Advantages are 0, so that all of the gradient is that of the terms; every completion is a micro-batch of its own."""
    config = AlgorithmConfig(objective=name, kl_coefficient=0.3, kl_estimator=estimator, entropy_coefficient=0.2)
    objective = Objective(config)
    assert objective.needs == ("logprobs", "entropy")
    counted = [token for tokens, masked in rows for token in tokens[masked:]]
    sums, slopes, pulls = LossSums(MiniBatch(len(counted), len(rows))), [], []
    for row in rows:
        micro, logprobs, entropy = packed([row], rollout_logprobs=-2.0, advantages=0.0)
        torch.autograd.backward(sums.add(objective(ModelOutputs(logprobs, entropy), micro)))
        assert logprobs.grad is not None
        assert entropy.grad is not None
        assert not bool((logprobs.grad.abs() + entropy.grad.abs())[~micro.mask].any())
        slopes += logprobs.grad[micro.mask].tolist()
        pulls += entropy.grad[micro.mask].tolist()
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


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_expected_gradients_are_none_that_of_the_reverse_and_that_of_the_forward_kl(estimator: Any) -> None:
    """Expectations over a vocabulary of four, exactly: each token's estimate times its probability, which has no gradient."""
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    policy = torch.log_softmax(logits, 0)
    reference = torch.log_softmax(torch.tensor([1.5, 0.0, -0.5, 0.25], dtype=torch.float64), 0)
    expected = (policy.exp().detach() * kl_estimate(policy, reference, estimator)).sum()
    (found,) = torch.autograd.grad(expected, logits, retain_graph=True)
    reverse, forward = (policy.exp() * (policy - reference)).sum(), (reference.exp() * (reference - policy)).sum()
    if estimator != "k2":
        assert float(expected.detach()) == pytest.approx(float(reverse.detach())), "unbiased"
    if estimator == "k1":
        assert found.tolist() == pytest.approx([0.0] * 4, abs=1e-12)
    else:
        (wanted,) = torch.autograd.grad(reverse if estimator == "k2" else forward, logits)
        assert found.tolist() == pytest.approx(wanted.tolist(), abs=1e-12)
        assert float(wanted.norm()) > 0.1


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(logprob, logprob), min_size=1, max_size=6), st.floats(-3, 3, width=32))
def test_rewards_have_a_penalty_for_every_token_and_the_completions_reward_at_the_last(
    estimator: Any, tokens: list[tuple[float, float]], reward: float
) -> None:
    policy, reference = (torch.tensor(each, dtype=torch.float64) for each in zip(*tokens, strict=True))
    found = kl_penalised_rewards(reward, policy.requires_grad_(), reference, coefficient=0.1, estimator=estimator)
    expected = [-0.1 * estimated(now, other, estimator)[0] for now, other in tokens]
    expected[-1] += reward
    assert (found.dtype, found.requires_grad) == (torch.float32, False)
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_rewards_of_no_token_or_of_another_number_of_tokens_are_refused() -> None:
    for policy, reference in ((torch.zeros(0), torch.zeros(0)), (torch.zeros(2), torch.zeros(3))):
        with pytest.raises(ProtocolError, match="Give one of each for every target of one completion"):
            kl_penalised_rewards(1.0, policy, reference, coefficient=0.1)


def test_a_batch_without_reference_logprobs_is_refused_by_name() -> None:
    values = {"rollout_logprobs": -1.0, "advantages": 1.0}
    micro = MicroBatch.of([TokenSequence.of_completion([1], [2], per_token=values)])
    objective = Objective(AlgorithmConfig(objective="grpo", kl_coefficient=0.1))
    with pytest.raises(ProtocolError, match="the loss needs the per-token value reference_logprobs, and the batch has"):
        objective(ModelOutputs.nothing(micro, 1), micro)


def test_terms_of_a_micro_batch_without_targets_are_the_same_and_all_zero() -> None:
    values = {"rollout_logprobs": -1.0, "advantages": 1.0, "reference_logprobs": -1.0}
    like = TokenSequence.of_completion([1], [2], per_token=values)
    objective = Objective(AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.1))
    empty, one = MicroBatch.without_targets(like), MicroBatch.of([like])
    nothing, something = objective(ModelOutputs.nothing(empty, 1), empty), objective(ModelOutputs.nothing(one, 1), one)
    assert (list(nothing.terms), list(nothing.metrics)) == (list(something.terms), list(something.metrics))
    assert list(nothing.terms) == ["policy", "reference_kl", "entropy_bonus"]
    assert [float(term.total) for term in nothing.terms.values()] == [0.0] * 3


def test_an_objective_of_ones_own_gets_the_terms_too_unless_it_has_one_of_that_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_terms.py").write_text(
        "from weightlane.trainer import LossOutput, LossTerm\n"
        "def fine(outputs, micro):\n"
        "    return LossOutput({'mine': LossTerm(outputs.required('logprobs').sum())})\n"
        "def taken(outputs, micro):\n"
        "    return LossOutput({'entropy_bonus': LossTerm(outputs.required('logprobs').sum())})\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    micro = MicroBatch.of([TokenSequence.of_completion([1], [2])])
    outputs = ModelOutputs(torch.tensor([-1.0]), torch.tensor([2.0]))
    objective = Objective(AlgorithmConfig(objective="own_terms:fine", entropy_coefficient=0.5), [tmp_path])
    found = {name: float(term.total) for name, term in objective(outputs, micro).terms.items()}
    assert found == {"mine": -1.0, "entropy_bonus": -1.0}
    taken = Objective(AlgorithmConfig(objective="own_terms:taken", entropy_coefficient=0.5), [tmp_path])
    with pytest.raises(ProtocolError, match="both name entropy_bonus"):
        taken(outputs, micro)


@pytest.mark.parametrize(
    "settings", [{"kl_coefficient": -0.1}, {"kl_estimator": "k4"}, {"entropy_coefficient": math.nan}]
)
def test_coefficients_that_make_no_sense_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match=next(iter(settings))):
        AlgorithmConfig(**settings)
