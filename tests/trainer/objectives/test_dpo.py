"""Direct preference optimization, value and gradient, by hand and over splits that keep pairs together."""

from __future__ import annotations

import math
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.trainer import dpo
from weightlane.trainer.data.batch import MicroBatch, MiniBatch, TokenBatch, TokenSequence
from weightlane.trainer.engines.torch_engine import TorchEngine
from weightlane.trainer.objectives.loss import LossSums, ModelOutputs

VOCABULARY = 11
Side = tuple[list[tuple[float, float]], int]
"""Log-probability now and in the reference of each token of a completion, and how many leading tokens are masked."""
logprob = st.floats(-6.0, -0.0078125, width=32) | st.floats(-400.0, -0.0078125, width=32)
side: st.SearchStrategy[Side] = st.lists(st.tuples(logprob, logprob), min_size=1, max_size=5).flatmap(
    lambda tokens: st.tuples(st.just(tokens), st.integers(0, len(tokens) - 1))
)


def log_sigmoid(x: float) -> float:
    return -math.log1p(math.exp(-x)) if x > 0 else x - math.log1p(math.exp(x))


def in_doubles(micro: MicroBatch) -> MicroBatch:
    object.__setattr__(micro, "per_token", {name: each.double() for name, each in micro.per_token.items()})
    return micro


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
    micro = MicroBatch.of(
        [
            TokenSequence.of_completion(
                [1, 2],
                [3] * len(tokens),
                masked=masked,
                per_token={"reference_logprobs": [reference for _, reference in tokens]},
            )
            for pair in pairs
            for tokens, masked in pair
        ],
        together=2,
    )
    in_doubles(micro)
    logprobs = torch.full(micro.targets.shape, -33.0, dtype=torch.float64)  # junk where nothing is predicted
    logprobs[micro.mask] = torch.tensor(
        [now for pair in pairs for tokens, masked in pair for now, _ in tokens[masked:]], dtype=torch.float64
    )
    sums = LossSums(MiniBatch(float(micro.mask.sum()), 2.0 * len(pairs)))
    torch.autograd.backward(
        sums.add(dpo(beta=beta, label_smoothing=smoothing)(ModelOutputs(logprobs.requires_grad_()), micro))
    )
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
    assert logprobs.grad is not None
    assert logprobs.grad[micro.mask].tolist() == pytest.approx(slopes, rel=1e-9, abs=1e-12)
    assert not bool(logprobs.grad[~micro.mask].any())
    assert found["reward_margin"] == pytest.approx(math.fsum(margins) / len(pairs), rel=1e-9, abs=1e-9)
    assert found["reward_chosen"] - found["reward_rejected"] == pytest.approx(found["reward_margin"], abs=1e-9)
    clear = [margin for margin in margins if abs(margin) > 1e-9]
    if len(clear) == len(margins):
        assert found["reward_accuracy"] == pytest.approx(sum(margin > 0 for margin in margins) / len(pairs))


def random_pairs(rng: random.Random, pairs: int) -> list[TokenSequence]:
    sequences = []
    for _ in range(2 * pairs):
        completion = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 9))]
        reference = [-rng.uniform(0.1, 4.0) for _ in completion]
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))]
        sequences.append(TokenSequence.of_completion(prompt, completion, per_token={"reference_logprobs": reference}))
    return sequences


@given(st.integers(0, 10**6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 60), st.booleans())
def test_the_gradient_of_a_mini_batch_of_pairs_is_the_same_however_it_is_split(
    seed: int, pairs: int, world: int, budget: int, padded: bool
) -> None:
    """A table of logits stands for the model; calls, ranks and micro-batches are those of the engines."""
    rng = random.Random(seed)
    sequences = random_pairs(rng, pairs)
    torch.manual_seed(seed)
    table = torch.randn(VOCABULARY, VOCABULARY, dtype=torch.float64, requires_grad=True)
    loss, mini_batch = dpo(beta=0.7, label_smoothing=0.1), MiniBatch.of_sequences(sequences)

    def backward(micro: MicroBatch, sums: LossSums) -> None:
        logs = torch.log_softmax(table[micro.tokens], 1).gather(1, micro.targets.clamp(min=0)[:, None])[:, 0]
        sums.add(loss(ModelOutputs(torch.where(micro.mask, logs, 0.0)), in_doubles(micro))).backward()  # type: ignore[no-untyped-call]

    whole = LossSums(mini_batch)
    backward(TokenBatch(tuple(sequences), together=2).packed, whole)
    assert table.grad is not None
    wanted, table.grad = table.grad, None

    totals: list[torch.Tensor] = []
    cuts = sorted(2 * rng.randint(0, pairs) for _ in range(2))
    for part in (sequences[: cuts[0]], sequences[cuts[0] : cuts[1]], sequences[cuts[1] :]):
        for rank in range(world if part else 0):
            engine = SimpleNamespace(
                _vocabulary=VOCABULARY, _device=torch.device("cpu"), config=SimpleNamespace(micro_batch_tokens=budget)
            )
            batch = TokenBatch(tuple(part), together=2)
            sums = LossSums(mini_batch)
            for indices, micro in TorchEngine._share(engine, batch, rank, world, padded=padded):  # type: ignore[arg-type]
                assert indices == [index for first in indices[::2] for index in (first, first + 1)]
                assert all(first % 2 == 0 for first in indices[::2])
                backward(micro, sums)
            totals.append(sums.as_tensor())
    torch.testing.assert_close(table.grad, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.stack(totals).sum(0), whole.as_tensor(), rtol=1e-10, atol=1e-12)


def test_a_batch_whose_sequences_are_not_in_pairs_is_refused_also_where_their_number_is_even() -> None:
    like = TokenSequence.of_completion([1], [2], per_token={"reference_logprobs": -1.0})
    micro = TokenBatch((like, like)).packed
    with pytest.raises(ProtocolError, match=r"groups of 1, where dpo compares pairs\. .*together=2"):
        dpo()(ModelOutputs.nothing(micro, 1), micro)
    bare = TokenBatch((TokenSequence.of_completion([1], [2]),) * 2, together=2).packed
    with pytest.raises(ProtocolError, match="needs the per-token value reference_logprobs, and the batch has none"):
        dpo()(ModelOutputs.nothing(bare, 1), bare)
    for beta, smoothing in ((0.0, 0.0), (math.nan, 0.0), (0.1, -0.1), (0.1, 0.5), (0.1, math.nan)):
        with pytest.raises(ConfigError, match=r"at least 0 and below 0\.5"):
            dpo(beta=beta, label_smoothing=smoothing)
