"""Objectives, value and gradient, against formulas worked out by hand on single numbers; and objectives by name."""

from __future__ import annotations

import itertools
import math
import pickle
import re
import sys
import tomllib
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from loss_batches import at_targets, completion, in_float64, slopes_at_targets
from pydantic import ValidationError

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.trainer import dpo, kl_penalised_rewards, value_loss
from weightlane.trainer.data.batch import LossDenominators
from weightlane.trainer.data.sequences import MicroBatch, TokenSequence
from weightlane.trainer.objectives.config import AlgorithmConfig
from weightlane.trainer.objectives.loss import LossSums, ModelOutputs
from weightlane.trainer.objectives.named import BUILT_IN, Objective

Token = tuple[float, float, float]
"""Log-probabilities of a token: now, in the rollout, and proximal."""
Rows = list[tuple[list[Token], float, int]]
"""Tokens, advantage and number of masked tokens of each completion."""

logprob = st.floats(-6.0, -0.01)
far = st.floats(-80.0, -0.01)
rows_of: st.SearchStrategy[Rows] = st.lists(
    st.lists(st.tuples(logprob | far, logprob | far, logprob | far), min_size=1, max_size=5).flatmap(
        lambda tokens: st.tuples(st.just(tokens), st.just(0.0) | st.floats(-3, 3), st.integers(0, len(tokens) - 1))
    ),
    min_size=1,
    max_size=4,
)


def as_float32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def expected(name: str, rows: Rows, config: AlgorithmConfig, *, proximal: bool) -> tuple[float, list[float]]:
    """The loss and its derivative by the log-probability of each target, by the formulas of the papers.

    The advantage of a token is that of its completion times its place, counted from 1.
    """
    low, high, cap = 1 - config.clip_low, 1 + config.clip_high, config.importance_cap
    counted = [
        (
            [(now, as_float32(rollout), as_float32(prox)) for now, rollout, prox in tokens[masked:]],
            [as_float32(advantage * (place + 1)) for place in range(masked, len(tokens))],
        )
        for tokens, advantage, masked in rows
    ]
    all_tokens = sum(len(tokens) for tokens, _ in counted)
    loss = 0.0
    slopes: list[float] = []
    every: list[float] = []
    """`slopes`, with a 0 for each target that is left out."""
    for all_of_it, all_advantages in counted:
        within = agreed([(prox if proximal else now) - rollout for now, rollout, prox in all_of_it], config)
        tokens = list(itertools.compress(all_of_it, within))
        advantages = list(itertools.compress(all_advantages, within))
        slopes = []
        if not tokens:
            every += [0.0] * len(within)
            continue
        around = [p if proximal else (r if config.proximal == "rollout" else n) for n, r, p in tokens]
        drifts = [a - rollout for a, (_, rollout, _) in zip(around, tokens, strict=True)]
        if config.importance_level == "sequence":
            drifts = [sum(drifts)] * len(drifts)
        weights = [min(math.exp(min(drift, 100.0)), cap) for drift in drifts]
        if name == "gspo":
            drift = sum(now - a for a, (now, _, _) in zip(around, tokens, strict=True)) / len(tokens)
            ratio, weight, advantage = math.exp(min(drift, 20.0)), fmean(weights), fmean(advantages)
            clipped = min(max(ratio, low), high)
            loss -= weight * min(ratio * advantage, clipped * advantage) / len(counted)
            moves = ratio * advantage <= clipped * advantage and drift < 20.0
            slope = -weight * ratio * advantage / len(tokens) / len(counted) if moves else 0.0
            slopes = [slope] * len(tokens)
        by_token = [] if name == "gspo" else list(zip(tokens, around, weights, advantages, strict=True))
        for (now, rollout, _), a, weight, advantage in by_token:
            if name == "dual_clip":
                ratio = min(math.exp(min(now - rollout, 20.0)), config.ratio_cap)
                clipped = min(max(ratio, low), high)
                loss -= min(ratio * advantage, clipped * advantage) / all_tokens
                moves = ratio * advantage <= clipped * advantage and ratio < config.ratio_cap
                slopes.append(-ratio * advantage / all_tokens if moves else 0.0)
                continue
            if name == "cispo":
                clipped = min(max(math.exp(min(now - rollout, 20.0)), low), high)
                loss -= clipped * advantage * now / all_tokens
                slopes.append(-clipped * advantage / all_tokens)
                continue
            ratio = math.exp(min(now - a, 20.0))
            clipped = min(max(ratio, low), high)
            loss -= weight * min(ratio * advantage, clipped * advantage) / all_tokens
            moves = ratio * advantage <= clipped * advantage and now - a < 20.0
            slopes.append(-weight * ratio * advantage / all_tokens if moves else 0.0)
        kept_slopes = iter(slopes)
        every += [next(kept_slopes) if kept else 0.0 for kept in within]
    return loss, every


def agreed(apart: list[float], config: AlgorithmConfig) -> list[bool]:
    """Whether each token of a completion stays in the loss: the gap of its log-probabilities is not too large."""
    if config.mismatch_mask == "sequence":
        apart = [fmean(apart)] * len(apart)
    ratios = [math.exp(min(gap, 100.0)) for gap in apart]
    return [config.mismatch_mask == "none" or config.mismatch_low <= each <= config.mismatch_high for each in ratios]


TRAINER: dict[str, Any] = {"proximal": "trainer"}
BY_SEQUENCE: dict[str, Any] = {**TRAINER, "importance_level": "sequence", "importance_cap": 1.2}


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("grpo", {}),
    ("grpo", TRAINER),
    ("ppo", BY_SEQUENCE),
    ("gspo", {}),
    ("gspo", BY_SEQUENCE),
    ("cispo", {}),
    ("dual_clip", {}),
    ("dual_clip", {"mismatch_mask": "token", "mismatch_low": 0.7, "mismatch_high": 1.5}),
    ("ppo", {**BY_SEQUENCE, "mismatch_mask": "token"}),
    ("cispo", {"mismatch_mask": "sequence", "mismatch_low": 0.0, "mismatch_high": 2.0}),
    ("gspo", {**TRAINER, "mismatch_mask": "sequence"}),
    ("gspo", {"mismatch_mask": "token"}),
]


@given(rows_of, st.booleans())
@example([([(-0.7, -1.0, -0.8)] * 4, 1.0, 0), ([(-2.0, -0.5, -2.1), (-1.0, -0.9, -1.0)], -1.0, 0)], False)
@example([([(-0.1, -2.0, -1.9), (-3.0, -1.0, -1.1)], 1.0, 0)], True)
@example(
    [([(-0.01, -70.0, -0.5)] * 5, 1.0, 0), ([(-70.0, -0.01, -0.02)], -2.0, 0), ([(-1.0, -2.0, -1.5)], 0.0, 0)], False
)
def test_value_and_gradient_are_the_papers(rows: Rows, proximal: bool) -> None:
    """Also of ratios too large for float32. `proximal` is whether log-probabilities were computed again before training."""
    sequences = []
    for tokens, advantage, masked in rows:
        values: dict[str, Any] = {"rollout_logprobs": [token[1] for token in tokens]}
        values["advantages"] = [advantage * (place + 1) for place in range(len(tokens))]
        if proximal:
            values["proximal_logprobs"] = [token[2] for token in tokens]
        sequences.append(completion(len(tokens), masked, **values))
    micro = in_float64(MicroBatch.of(sequences))
    for name, further in CONFIGS:
        config = AlgorithmConfig(objective=name, clip_low=0.2, clip_high=0.3, **further)
        logprobs = at_targets(micro, [now for tokens, _, masked in rows for now, _, _ in tokens[masked:]])
        output = Objective(config)(ModelOutputs(logprobs), micro)
        sums = LossSums(LossDenominators(float(micro.mask.sum()), float(len(rows))))
        torch.autograd.backward(sums.add(output))
        loss, slopes = expected(name, rows, config, proximal=proximal)
        assert sums.named(sums.as_tensor(), 1)["loss"] == pytest.approx(loss, rel=1e-6, abs=1e-9), (name, further)
        assert slopes_at_targets(logprobs, micro) == pytest.approx(slopes, rel=1e-6, abs=1e-9), (name, further)
        assert all(math.isfinite(float(value)) for value in output.metrics.values())


def test_metrics_of_a_policys_loss_are_those_of_its_ratio() -> None:
    for ratio, advantage, clipped in ((1.4, 1.0, 1.0), (0.5, 1.0, 0.0), (5.0, -1.0, 1.0), (1.4, 0.0, 0.0)):
        micro = MicroBatch.of([completion(1, rollout_logprobs=-2.0, advantages=advantage)])
        logprobs = at_targets(micro, [-2.0 + math.log(ratio)]).float()
        found = Objective(AlgorithmConfig())(ModelOutputs(logprobs), micro).metrics
        assert {name: float(value) for name, value in found.items()} == pytest.approx(
            {
                "ratio": min(ratio, AlgorithmConfig().ratio_cap),
                "entropy": 2.0 - math.log(ratio),
                "clip_fraction": clipped,
                "approx_kl": ratio - 1 - math.log(ratio),
                "rollout_gap": abs(math.log(ratio)),
            },
            rel=1e-5,
        )


def test_metrics_are_of_all_targets_also_where_some_are_left_out_of_the_loss() -> None:
    micro = MicroBatch.of([completion(2, rollout_logprobs=[-2.0, -9.0], advantages=1.0)])
    logprobs = at_targets(micro, [-2.1, -2.0]).float()
    plain, masked = (
        Objective(AlgorithmConfig(mismatch_mask=mask))(ModelOutputs(logprobs), micro).metrics
        for mask in ("none", "token")
    )
    assert float(masked.pop("mismatch_masked")) == 1.0
    assert masked == plain


def test_a_micro_batch_without_targets_has_the_same_sums_and_all_are_zero() -> None:
    """So that a rank without a sequence adds up the same numbers as the others."""
    values = dict.fromkeys(("rollout_logprobs", "advantages", "reference_logprobs", "returns", "old_values"), -1.0)
    like = completion(1, **values)
    terms = AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.1, value_clip=0.2)
    losses: list[Any] = [Objective(terms.model_copy(update={"objective": name})) for name in BUILT_IN]
    for loss, unit in (*((each, 1) for each in losses), (value_loss(terms), 1), (dpo(), 2)):
        empty, some = MicroBatch.without_targets(like, unit), MicroBatch.of([like] * unit, unit)
        nothing, something = loss(ModelOutputs.nothing(empty, 1), empty), loss(ModelOutputs.nothing(some, 1), some)
        assert (list(nothing.terms), list(nothing.metrics)) == (list(something.terms), list(something.metrics))
        assert not any(float(term.divided(LossDenominators(0, 0))) for term in nothing.terms.values())
        assert not any(float(getattr(value, "total", value)) for value in nothing.metrics.values())


exact = st.floats(-6.0, -0.0078125, width=32) | st.floats(-80.0, -0.0078125, width=32)
"""Log-probabilities that float32 holds."""
estimators: st.SearchStrategy[Any] = st.sampled_from(["k1", "k2", "k3"])
KlRow = tuple[list[tuple[float, float, float]], int]
"""Log-probability now and in the reference, and entropy, of each token; and how many leading tokens are masked."""
kl_rows: st.SearchStrategy[list[KlRow]] = st.lists(
    st.lists(st.tuples(exact, exact, st.floats(0, 5, width=32)), min_size=1, max_size=5).flatmap(
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


KL_FAR_APART: list[KlRow] = [
    ([(-0.0078125, -70.0, 1.0), (-70.0, -0.0078125, 2.0), (-2.0, -2.0, 0.0)], 0),
    ([(-3.0, -1.0, 1.0)] * 3, 2),
]


@given(estimators, st.sampled_from(sorted(BUILT_IN)), kl_rows)
@example("k1", "ppo", KL_FAR_APART)
@example("k2", "gspo", KL_FAR_APART)
@example("k3", "grpo", KL_FAR_APART)
def test_kl_and_entropy_are_means_over_tokens_beside_every_objective_value_and_gradient(
    estimator: Any, name: str, rows: list[KlRow]
) -> None:
    """Advantages are 0, so that all of the gradient is that of the terms; every completion is a micro-batch of its own."""
    config = AlgorithmConfig(objective=name, kl_coefficient=0.3, kl_estimator=estimator, entropy_coefficient=0.2)
    objective = Objective(config)
    assert objective.needs == ("logprobs", "entropy")
    counted = [token for tokens, masked in rows for token in tokens[masked:]]
    sums, slopes, pulls = LossSums(LossDenominators(len(counted), len(rows))), [], []
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


def test_rewards_are_penalised_only_with_a_reference_for_every_token() -> None:
    for policy, reference in ((torch.zeros(0), torch.zeros(0)), (torch.zeros(2), torch.zeros(3))):
        with pytest.raises(ProtocolError, match="Give one of each for every target of one completion"):
            kl_penalised_rewards(1.0, policy, reference, coefficient=0.1)


OWN = """
from weightlane.trainer import LossOutput, LossTerm, needs

@needs("logprobs", "entropy")
def curious(outputs, micro):
    return LossOutput({"mine": LossTerm(-outputs.required("entropy").sum())})

def taken(outputs, micro):
    return LossOutput({"entropy_bonus": LossTerm(outputs.required("logprobs").sum())})

def wrong(outputs, micro):
    return 3.0
"""


def test_a_loss_of_ones_own_is_found_beside_the_configuration_also_by_another_process_and_gets_the_terms_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_loss.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    outputs, micro = (
        ModelOutputs(torch.tensor([-1.0]), torch.tensor([2.0])),
        MicroBatch.of([TokenSequence.of_completion([1], [2])]),
    )

    def objective(function: str) -> Objective:
        config = AlgorithmConfig(objective=f"own_loss:{function}", entropy_coefficient=0.5)
        again: Objective = pickle.loads(pickle.dumps(Objective(config, [tmp_path])))
        return again

    assert objective("curious").needs == ("logprobs", "entropy")
    terms = objective("curious")(outputs, micro).terms
    assert {name: float(term.total) for name, term in terms.items()} == {"mine": -2.0, "entropy_bonus": -1.0}
    with pytest.raises(KeyError, match=r"decorate it with needs\('entropy'\)"):
        objective("curious")(ModelOutputs(torch.tensor([-1.0])), micro)
    with pytest.raises(ProtocolError, match="both name entropy_bonus"):
        objective("taken")(outputs, micro)
    with pytest.raises(ProtocolError, match=r"'own_loss:wrong' returned a float, not a LossOutput"):
        objective("wrong")(outputs, micro)


def test_the_guides_loss_is_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    guide = Path(__file__).parents[3] / "docs/guides/your-own-loss.md"
    (tmp_path / "my_loss.py").write_text(re.findall(r"```python\n(.*?)```", guide.read_text(), re.DOTALL)[0])
    monkeypatch.setattr(sys, "path", [*sys.path])
    objective = Objective(AlgorithmConfig(objective="my_loss:loss"), [tmp_path])
    micro = MicroBatch.of([TokenSequence.of_completion([1], [2, 3], per_token={"advantages": 2.0})])
    found = objective(ModelOutputs(torch.tensor([-1.0, -3.0]), torch.tensor([0.5, 1.0])), micro)
    assert {name: float(term.total) for name, term in found.terms.items()} == {
        "policy": 8.0,
        "entropy": pytest.approx(-0.015),
    }


def test_the_code_in_the_guide_of_objectives_runs() -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/objectives.md").read_text()
    critic, pairs = ({"__name__": "guide"}, {"__name__": "guide"})
    for block, names in zip(re.findall(r"```python\n(.*?)```", guide, re.DOTALL), (critic, pairs), strict=True):
        exec(block, names)
    assert critic["advantages"].tolist() == pytest.approx([1.0, -1.0], abs=1e-4)
    micro = pairs["batch"].packed
    found = pairs["loss"](ModelOutputs(torch.tensor([0.0, -0.5, -1.0, 0.0, -2.0])), micro)
    assert float(found.terms["dpo"].divided(LossDenominators.of(pairs["batch"]))) == pytest.approx(math.log(2))
    objective, replay, batch = (
        AlgorithmConfig(**tomllib.loads(block)["algorithm"])
        for block in re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    )
    assert (Objective(objective).name, replay.router_replay, batch.updates_per_batch) == ("gspo", True, 8)
    assert set(re.findall(r"^\| `(\w+)` \|", guide.split("Two terms")[0], re.MULTILINE)) == set(BUILT_IN)


def test_an_objective_that_cannot_be_had_says_why() -> None:
    for name, problem in (
        (
            "grpa",
            r"algorithm.objective is 'grpa'.* Did you mean 'grpo'\? Built in: cispo, dual_clip, grpo, gspo, ppo",
        ),
        (":f", r"':f' is not of the form 'module:function'. Set algorithm.objective"),
    ):
        with pytest.raises(ConfigError, match=problem):
            Objective(AlgorithmConfig(objective=name))
    with pytest.raises(ValidationError, match=r"ratio_cap \(1.1\) must be at least 1 \+ clip_high \(1.28\)"):
        AlgorithmConfig(ratio_cap=1.1)
