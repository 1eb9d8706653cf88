"""Batches and losses of the engines' tests, the same in every process."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightlane.trainer.data.batch import TokenBatch
from weightlane.trainer.data.sequences import NO_EXPERT, ROUTED_EXPERTS, MicroBatch, TokenSequence
from weightlane.trainer.objectives.config import AlgorithmConfig
from weightlane.trainer.objectives.loss import LossOutput, LossTerm, ModelOutputs, needs
from weightlane.trainer.objectives.policy import dual_clip
from weightlane.trainer.objectives.policy_values import ADVANTAGES, ROLLOUT_LOGPROBS
from weightlane.trainer.objectives.supervised import sft

TEMPERATURE = 0.9
VOCAB = 61  # odd: the embedding's rows do not divide by two ranks
PREFIX = tuple(range(3, 21))
"""Tokens that some samples of every step begin with: long enough to be computed once for all of them."""
PREFIXED = (1, 2, 4)
"""These samples, by number."""


@dataclass
class Sample:
    """A prompt and a completion, as plain numbers."""

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    advantage: float

    def sequence(self, experts: int = 0) -> TokenSequence:
        """The sample as a sequence; with `experts`, the number of a layer's, routed to some of them."""
        sequence = TokenSequence.of_completion(
            self.prompt_ids,
            self.completion_ids,
            per_token={ROLLOUT_LOGPROBS: self.rollout_logprobs, ADVANTAGES: self.advantage},
            per_sequence={"temperature": TEMPERATURE},
        )
        if experts:
            given = routes(sequence.tokens, 4, experts, turned=self.advantage > 0)
            sequence = replace(sequence, per_token={**sequence.per_token, ROUTED_EXPERTS: given})
        return sequence


def routes(tokens: torch.Tensor, layers: int, experts: int, *, turned: bool = False) -> torch.Tensor:
    """Two experts for each token and layer, by which neighbours differ: int16 [tokens, layers, 2]; the first token has none."""
    codes = tokens[:, None] * 5 + torch.arange(len(tokens))[:, None] + torch.arange(layers) * 3 + turned
    first = codes % experts
    found = torch.stack([first, (first + 1 + codes // experts % (experts - 1)) % experts], -1).to(torch.int16)
    found[0] = NO_EXPERT
    return found


def make_samples(step: int, rows: int = 6) -> list[Sample]:
    """Samples of `step`, of different lengths, the same in every process."""
    rng = random.Random(step)
    samples = []
    for row in range(rows):
        prompt = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 6)))
        prompt = PREFIX + prompt if row in PREFIXED else prompt
        completion = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(1, 7)))
        logprobs = tuple(-rng.uniform(3.0, 5.0) for _ in completion)
        samples.append(Sample(prompt, completion, logprobs, rng.gauss(0.0, 1.0)))
    return samples


def batch_of(samples: Iterable[Sample], experts: int = 0) -> TokenBatch:
    return TokenBatch(tuple(sample.sequence(experts) for sample in samples))


def make_batch(step: int, rows: int = 6) -> TokenBatch:
    """The samples of `step` as a batch."""
    return batch_of(make_samples(step, rows))


@needs("logprobs", "entropy")
def mixed(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
    """Three terms of different normalisation: over tokens, over sequences, by a constant."""
    logprobs, entropy = outputs.required("logprobs"), outputs.required("entropy")
    lengths = micro.sum_by_sequence(micro.mask.float()).clamp(min=1)
    return LossOutput(
        {
            "policy": LossTerm(-(micro.per_token[ADVANTAGES] * logprobs).sum()),
            "square": LossTerm((micro.sum_by_sequence(logprobs.square()) / lengths).sum(), "sequences"),
            "entropy": LossTerm(-entropy.sum(), 50.0),
        }
    )


@needs("values", "hidden")
def valued(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
    """Squared errors of values, and a term of the hidden states that they are made of."""
    hidden = outputs.required("hidden")[micro.mask].float()
    errors = torch.where(micro.mask, outputs.required("values") - micro.per_token[ADVANTAGES], 0.0)
    return LossOutput(
        {"error": LossTerm(errors.square().sum()), "hidden": LossTerm((hidden * torch.linspace(-1, 1, 16)).sum(), 70.0)}
    )


@needs("hidden")
def headless(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
    """A term of the hidden states, so that the head has no gradient."""
    hidden = outputs.required("hidden")[micro.mask].float()
    return LossOutput({"loss": LossTerm((hidden * torch.linspace(-1, 1, hidden.shape[1])).sum(), 70.0)})


@needs("logprobs", "hidden")
def one_sided(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
    """`headless` where a micro-batch has no targets, so that an untied head has a gradient on the other ranks only."""
    if not micro.mask.any():
        return headless(outputs, micro)
    return LossOutput({"loss": LossTerm(-outputs.required("logprobs").sum(), 70.0)})


LOSSES: dict[str, Any] = {
    "sft": sft,
    "policy": dual_clip(AlgorithmConfig()),
    "mixed": mixed,
    "valued": valued,
    "headless": headless,
    "one-sided": one_sided,
}
