"""Direct preference optimization, value and gradient, by hand. `test_algorithms` splits its mini-batches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from loss_batches import at_targets, completion, in_float64, slopes_at_targets

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.trainer import dpo
from weightlane.trainer.data.batch import LossDenominators, TokenBatch
from weightlane.trainer.data.sequences import MicroBatch
from weightlane.trainer.objectives.loss import LossSums, ModelOutputs

Side = tuple[list[tuple[float, float]], int]
"""Log-probability now and in the reference of each token of a completion, and how many leading tokens are masked."""
logprob = st.floats(-6.0, -0.0078125, width=32) | st.floats(-400.0, -0.0078125, width=32)
side: st.SearchStrategy[Side] = st.lists(st.tuples(logprob, logprob), min_size=1, max_size=5).flatmap(
    lambda tokens: st.tuples(st.just(tokens), st.integers(0, len(tokens) - 1))
)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


FAR_APART: list[tuple[Side, Side]] = [
    (([(-0.125, -400.0)] * 3, 0), ([(-400.0, -0.125)] * 5, 1)),
    (([(-400.0, -0.125)] * 3, 0), ([(-0.125, -400.0)] * 5, 1)),
    (([(-1.0, -1.0)], 0), ([(-2.0, -2.0)] * 2, 0)),
]


@given(
    st.sampled_from([0.0, 0.2]), st.lists(st.tuples(side, side), min_size=1, max_size=4), st.sampled_from([0.1, 2.0])
)
@example(0.2, FAR_APART, 2.0)
def test_value_gradient_and_metrics_are_those_of_the_paper(
    smoothing: float, pairs: list[tuple[Side, Side]], beta: float
) -> None:
    sides = [each for pair in pairs for each in pair]
    sequences = [completion(len(each), masked, reference_logprobs=[ref for _, ref in each]) for each, masked in sides]
    micro = in_float64(MicroBatch.of(sequences, sequences_per_unit=2))
    logprobs = at_targets(micro, [now for each, masked in sides for now, _ in each[masked:]], elsewhere=-33.0)
    sums = LossSums(LossDenominators(float(micro.mask.sum()), 2.0 * len(pairs)))
    torch.autograd.backward(sums.add(dpo(beta=beta, label_smoothing=smoothing)(ModelOutputs(logprobs), micro)))
    loss, slopes, margins = 0.0, [], []
    for pair in pairs:
        gains = [math.fsum(now - reference for now, reference in tokens[masked:]) for tokens, masked in pair]
        margin = beta * (gains[0] - gains[1])
        margins.append(margin)
        loss -= ((1 - smoothing) * log_sigmoid(margin) + smoothing * log_sigmoid(-margin)) / len(pairs)
        slope = -((1 - smoothing) * math.exp(log_sigmoid(-margin)) - smoothing * math.exp(log_sigmoid(margin)))
        for sign, (tokens, masked) in zip((1, -1), pair, strict=True):
            slopes += [sign * slope * beta / len(pairs)] * (len(tokens) - masked)
    found = sums.named(sums.as_tensor(), int(micro.mask.sum()))
    assert found["loss"] == pytest.approx(loss, rel=1e-9, abs=1e-12)
    assert slopes_at_targets(logprobs, micro) == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    assert found["reward_margin"] == pytest.approx(math.fsum(margins) / len(pairs), rel=1e-9, abs=1e-9)
    assert found["reward_chosen"] - found["reward_rejected"] == pytest.approx(found["reward_margin"], abs=1e-9)
    if all(abs(margin) > 1e-9 for margin in margins):
        assert found["reward_accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / len(pairs))


def test_a_batch_whose_sequences_are_not_in_pairs_is_refused_also_where_their_number_is_even() -> None:
    micro = TokenBatch((completion(1, reference_logprobs=-1.0),) * 2).packed
    with pytest.raises(ProtocolError, match=r"groups of 1, where dpo compares pairs\. .*sequences_per_unit=2"):
        dpo()(ModelOutputs.nothing(micro, 1), micro)
    for beta, smoothing in ((0.0, 0.0), (math.nan, 0.0), (0.1, -0.1), (0.1, 0.5)):
        with pytest.raises(ConfigError, match=r"at least 0 and below 0\.5"):
            dpo(beta=beta, label_smoothing=smoothing)
