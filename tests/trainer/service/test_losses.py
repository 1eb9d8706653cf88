"""Losses of the Tinker API, value and gradient, against their published formulas worked out token by token in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.trainer.data.batch import LossDenominators, TokenBatch
from weightlane.trainer.data.sequences import IGNORED, MicroBatch, TokenSequence
from weightlane.trainer.objectives.loss import LossSums, ModelOutputs
from weightlane.trainer.service.losses import NAMES, ServiceLoss, loss_report


@dataclass(frozen=True)
class Token:
    p: float
    q: float
    advantage: float
    weight: float
    marked: float


logprob = st.floats(-6.0, -0.01)
far = st.floats(-80.0, -0.01)
token = st.builds(
    Token,
    logprob | far,
    logprob | far,
    st.just(0.0) | st.floats(-3, 3),
    st.sampled_from((0.0, 1.0, 1.0, -0.5, 2.5)),
    st.sampled_from((0.0, 1.0)),
)
Rows = list[list[Token]]
rows_of: st.SearchStrategy[Rows] = st.lists(st.lists(token, min_size=1, max_size=5), min_size=1, max_size=4)

BOUND = 20.0
"""Log ratios above it count as this."""


def ratio_and_slope(log_ratio: float) -> tuple[float, float]:
    """The ratio, and its derivative by the model's log-probability."""
    ratio = math.exp(min(log_ratio, BOUND))
    return ratio, ratio if log_ratio <= BOUND else 0.0


def clipped_surrogate(log_ratio: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    ratio, slope = ratio_and_slope(log_ratio)
    inside = ratio <= high if advantage > 0 else ratio >= low
    value = ratio if inside else high if advantage > 0 else low
    return -value * advantage, -slope * advantage if inside else 0.0


def by_hand(name: str, row: Sequence[Token], config: dict[str, float]) -> list[tuple[float, float]]:
    """The loss of each token of a sequence before its weight, and its derivative by that token's log-probability."""
    marked = [each.p - each.q for each in row if each.marked]
    mean = sum(marked) / len(marked) if marked else 0.0
    found = []
    for each in row:
        p, drift, advantage = each.p, each.p - each.q, each.advantage
        match name:
            case "cross_entropy":
                found.append((-p, -1.0))
            case "importance_sampling":
                ratio, slope = ratio_and_slope(drift)
                found.append((-ratio * advantage, -slope * advantage))
            case "ppo":
                found.append(clipped_surrogate(drift, advantage, config["low"], config["high"]))
            case "cispo":
                held = min(max(ratio_and_slope(drift)[0], config["low"]), config["high"])
                found.append((-held * p * advantage, -held * advantage))
            case "dro":
                beta = config["beta"]
                found.append((-(p * advantage - 0.5 * beta * drift**2), -(advantage - beta * drift)))
            case "gspo":
                found.append(clipped_surrogate(mean, advantage, config["low"], config["high"]))
    return found


def batch_of(rows: Rows, columns: int = 1, names: Sequence[str] = ()) -> tuple[TokenBatch, torch.Tensor]:
    """`rows` with `columns` tokens in each position, and the model's log-probabilities. The last position may be padded."""
    sequences, logprobs = [], []
    for row in rows:
        length = -(-len(row) // columns)
        shape = (length, columns) if columns > 1 else (length,)

        def values(each: Sequence[float], fill: float = 0.0, shape: tuple[int, ...] = shape) -> torch.Tensor:
            padded = [*each, *[fill] * (math.prod(shape) - len(each))]
            return torch.tensor(padded, dtype=torch.float64).reshape(shape)

        inputs = {
            "logprobs": values([each.q for each in row]),
            "advantages": values([each.advantage for each in row]),
            "weights": values([each.weight for each in row]),
            "sequence_ratio_mask": values([each.marked for each in row]),
        }
        targets = values([7.0] * len(row), IGNORED).long()
        kept = {name: inputs[name] for name in names or inputs}
        sequences.append(TokenSequence(torch.ones(length, dtype=torch.int64), targets, kept))
        logprobs.append(values([each.p for each in row]))
    return TokenBatch(tuple(sequences)), torch.cat(logprobs)


def value_and_gradient(
    loss: ServiceLoss, micro: MicroBatch, logprobs: torch.Tensor
) -> tuple[float, torch.Tensor, dict[str, float]]:
    leaf = logprobs.clone().requires_grad_()
    sums = LossSums(LossDenominators(tokens=17.0, sequences=5.0))
    total = sums.add(loss(ModelOutputs(logprobs=leaf), micro))
    total.backward()
    assert leaf.grad is not None
    return float(total.detach()), leaf.grad, sums.named(sums.as_tensor(), 17)


CONFIGS: list[tuple[str, dict[str, float]]] = [
    ("cross_entropy", {}),
    ("importance_sampling", {}),
    ("ppo", {"low": 0.8, "high": 1.2}),
    ("cispo", {"low": 0.9, "high": 1.1}),
    ("dro", {"beta": 2.0}),
    ("gspo", {"low": 0.99, "high": 1.01}),
]


SETTINGS = {"low": "clip_low_threshold", "high": "clip_high_threshold", "beta": "beta"}


@given(rows_of, st.integers(1, 3))
def test_value_and_gradient_are_those_of_the_formula(rows: Rows, columns: int) -> None:
    batch, logprobs = batch_of(rows, columns)
    ignored = batch.packed.targets == IGNORED
    for name, config in CONFIGS:
        loss = ServiceLoss(name, {SETTINGS[key]: value for key, value in config.items()})
        total, gradient, _ = value_and_gradient(loss, batch.packed, logprobs)
        flat = [pair for row in rows for pair in zip(by_hand(name, row, config), row, strict=True)]
        expected = math.fsum(value * each.weight for (value, _), each in flat)
        slopes = [slope * each.weight for (_, slope), each in flat]
        assert total == pytest.approx(expected, rel=1e-9, abs=1e-9), name
        assert gradient[~ignored].tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-9), name
        assert not gradient[ignored].any()


FEW_ROWS = [[Token(-1.0, -1.3, 1.0, 1.0, 1.0), Token(-2.0, -1.9, -1.0, 0.5, 0.0)], [Token(-0.5, -0.1, 2.0, 1.0, 1.0)]]


def test_a_split_into_micro_batches_changes_nothing_and_a_forward_pass_reports_the_same() -> None:
    batch, logprobs = batch_of(FEW_ROWS)
    for name in NAMES:
        loss = ServiceLoss(name)
        whole, _, metrics = value_and_gradient(loss, batch.packed, logprobs)
        sums = LossSums(LossDenominators.of(batch))
        for sequence, part in zip(batch.sequences, batch.packed.split(logprobs), strict=True):
            sums.add(loss(ModelOutputs(logprobs=part), MicroBatch.of([sequence])))
        nothing = MicroBatch.without_targets(batch.sequences[0])
        sums.add(loss(ModelOutputs(logprobs=torch.zeros(1, dtype=torch.float64)), nothing))
        found = sums.named(sums.as_tensor(), 17)
        assert found == pytest.approx(metrics)
        assert found["loss"] == pytest.approx(whole)
        assert loss_report(loss, batch, batch.packed.split(logprobs)) == pytest.approx({**metrics, "tokens": 3.0})


def test_defaults_are_those_of_the_api_and_weights_are_one_where_there_are_none() -> None:
    rows = [[replace(each, weight=1.0) for each in row] for row in FEW_ROWS]
    batch, logprobs = batch_of(rows)
    without, _ = batch_of(rows, names=("logprobs", "advantages", "sequence_ratio_mask"))
    clip = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    wide = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
    defaults = {"ppo": clip, "gspo": clip, "cispo": wide, "dro": {"beta": 0.05}}
    for name in NAMES:
        explicit = value_and_gradient(ServiceLoss(name, defaults.get(name, {})), batch.packed, logprobs)
        assert value_and_gradient(ServiceLoss(name), without.packed, logprobs)[0] == explicit[0]


def test_a_token_has_thresholds_of_its_own() -> None:
    rows = [[Token(-1.0, -1.5, 1.0, 1.0, 1.0), Token(-1.0, -1.5, 1.0, 1.0, 1.0)]]
    batch, logprobs = batch_of(rows)
    batch = batch.with_values("clip_high_threshold", [torch.tensor([1.1, 9.0], dtype=torch.float64)])
    total, gradient, metrics = value_and_gradient(ServiceLoss("ppo"), batch.packed, logprobs)
    assert total == pytest.approx(-1.1 - math.exp(0.5))
    assert gradient.tolist() == pytest.approx([0.0, -math.exp(0.5)])
    assert metrics["clipped"] == 1.0


def test_metrics_are_sums_over_tokens_that_are_trained_on() -> None:
    trained = [Token(-1.0, -1.5, 1.0, 1.0, 1.0), Token(-1.0, -1.1, -2.0, 0.5, 1.0)]
    row = [Token(-9.0, 0.0, 0.0, 1.0, 0.0), *trained, Token(-9.0, 0.0, 1.0, 0.0, 0.0)]
    batch, logprobs = batch_of([row])
    _, _, metrics = value_and_gradient(ServiceLoss("ppo"), batch.packed, logprobs)
    ratios = [math.exp(0.5), math.exp(0.1)]
    assert metrics["trained_tokens"] == 2.0
    assert metrics["ratio"] == pytest.approx(sum(ratios))
    assert metrics["clipped"] == 1.0
    assert metrics["kl"] == pytest.approx(sum(ratios) - 2.0 - 0.6)
    assert value_and_gradient(ServiceLoss("cross_entropy"), batch.packed, logprobs)[2]["weights"] == 2.5


def test_nothing_overflows_in_float32() -> None:
    row = [Token(-0.01, -1e30, 0.0, 1.0, 0.0), Token(-0.01, -1e30, -3.0, 1.0, 1.0), Token(-1e30, -0.01, 3.0, 1.0, 1.0)]
    batch, logprobs = batch_of([row])
    for name, values in batch.packed.per_token.items():
        batch = batch.with_values(name, [values.float()])
    for name in ("importance_sampling", "ppo", "cispo", "gspo"):
        total, gradient, metrics = value_and_gradient(ServiceLoss(name), batch.packed, logprobs.float())
        assert torch.isfinite(gradient).all(), name
        assert all(map(math.isfinite, [total, *metrics.values()])), name


def test_errors_list_what_there_is() -> None:
    for name, settings, said in (
        ("custom", {}, r"importance_sampling.*gspo.*forward_backward_custom"),
        ("ppo", {"beta": 1.0}, r"no setting 'beta'.*clip_low_threshold .default 0\.8"),
        ("cross_entropy", {"beta": 1.0}, "settings: none"),
        ("dro", {"beta": math.nan}, "beta of dro"),
        ("dro", {"beta": -1.0}, "beta of dro"),
        ("dro", {"beta": "much"}, "beta of dro"),
        ("ppo", {"clip_low_threshold": 1.5}, r"clip_low_threshold of ppo is 1\.5, above"),
    ):
        with pytest.raises(ConfigError, match=said):
            ServiceLoss(name, settings)
    batch, _ = batch_of(FEW_ROWS)
    for name in NAMES:
        ServiceLoss(name).check_inputs(batch)
    bare, _ = batch_of(FEW_ROWS, names=("logprobs",))
    ServiceLoss("cross_entropy").check_inputs(bare)
    with pytest.raises(ProtocolError, match="gspo needs advantages, sequence_ratio_mask; loss_fn_inputs are logprobs"):
        ServiceLoss("gspo").check_inputs(bare)
    with pytest.raises(ProtocolError, match="no loss reads mask"):
        ServiceLoss("ppo").check_inputs(batch.with_values("mask", batch.packed.split(batch.packed.mask.float())))
