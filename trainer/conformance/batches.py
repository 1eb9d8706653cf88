"""Batches and losses of the checks, made from a seed: the same in the process of a check and in every rank."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from ..data.batch import LossDenominators, TokenBatch
from ..data.sequences import IGNORED, TEMPERATURE, MicroBatch, TokenSequence
from ..objectives.loss import Loss, LossOutput, LossTerm, ModelOutputs, needs
from .models import VOCABULARY

WEIGHTS = "weights"
"""The per-token value of every batch: the weight of each target in the loss."""
CONSTANT = 50.0
"""The constant by which the loss divides its third term."""
_LENGTHS = (3, 12, 1, 7, 2, 9, 5)
"""Lengths of the sequences, in tokens: uneven, and one is a single token."""


@dataclass(frozen=True, slots=True)
class BatchSpec:
    """A mini-batch, described for another process.

    `rows` sequences are made from `seed`. Each of `calls` lists the sequences of one call. Sequences in no call are left out, but
    count in the mini-batch. `labels` above 1 is the number of labels for each position. `wrong` puts a token, or a target, that
    no model has into the last sequence. With a `prompt`, each sequence begins with as many tokens of one of two prompts; what
    follows the first prompt begins alike, too, as far as it goes.
    """

    seed: int = 0
    rows: int = len(_LENGTHS)
    calls: tuple[tuple[int, ...], ...] = ()
    labels: int = 1
    wrong: str = ""
    prompt: int = 0

    def to_plain(self) -> dict[str, Any]:
        """Return the description as JSON."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_plain(cls, plain: dict[str, Any]) -> BatchSpec:
        """Make the description from the result of `to_plain`."""
        return cls(**{**plain, "calls": tuple(map(tuple, plain["calls"]))})

    def sequences(self) -> list[TokenSequence]:
        """All sequences. Some positions have no target, and temperatures differ."""
        source = random.Random(self.seed)  # noqa: S311 - it must be the same in all processes
        return [self._sequence(source, row) for row in range(self.rows)]

    def batches(self) -> list[TokenBatch]:
        """The batch of each call; all sequences in one call if there are none."""
        made = self.sequences()
        calls = self.calls or (tuple(range(self.rows)),)
        return [TokenBatch(tuple(made[row] for row in call)) for call in calls]

    def denominators(self) -> LossDenominators:
        """Count the tokens and sequences of the full mini-batch."""
        return LossDenominators.of_sequences(self.sequences())

    def _sequence(self, source: random.Random, row: int) -> TokenSequence:
        length = _LENGTHS[row % len(_LENGTHS)]
        tokens = torch.tensor([source.randrange(VOCABULARY) for _ in range(length)])
        if self.prompt:
            length += self.prompt - 1  # after some prompts, nothing follows
            shared = random.Random(f"{self.seed} {row % 2}")  # noqa: S311 - as above
            begins = torch.tensor([shared.randrange(VOCABULARY) for _ in range(length)])
            tokens = begins if row % 2 == 0 else torch.cat([begins[: self.prompt], tokens])[:length]
        shape = (length,) if self.labels == 1 else (length, self.labels)
        targets = torch.tensor([source.randrange(VOCABULARY) for _ in range(length * self.labels)]).view(shape)
        if length > 2:  # noqa: PLR2004 - room for a prompt, and for a gap as between turns of a conversation
            targets[[0, length // 2]] = IGNORED
        if self.labels > 1 and length > 1:
            targets[-1, 0] = IGNORED  # this position has a target, but not every label
        if self.wrong and row == self.rows - 1:
            (tokens if self.wrong == "token" else targets)[-1] = VOCABULARY + 9
        weights = torch.tensor([source.gauss(0.0, 1.0) for _ in range(length)])
        return TokenSequence(tokens, targets, {WEIGHTS: weights}, {TEMPERATURE: source.choice((0.75, 1.0, 1.5))})


def three_terms(scale: float = 1.0) -> Loss:
    """The suite's loss: three sums, each times `scale`, which are divided by tokens, by sequences, and by `CONSTANT`."""

    @needs("logprobs", "entropy")
    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        logprobs, entropy = outputs.required("logprobs"), outputs.required("entropy")
        by_token = logprobs if logprobs.ndim == 1 else logprobs.sum(1)
        squares = logprobs.square() if logprobs.ndim == 1 else logprobs.square().sum(1)
        lengths = micro.sum_by_sequence(micro.mask.float()).clamp(min=1)
        squares = micro.sum_by_sequence(squares) / lengths
        return LossOutput(
            {
                "weighted": LossTerm(-(micro.per_token[WEIGHTS] * by_token).sum() * scale),
                "square": LossTerm(squares.sum() * scale, "sequences"),
                "entropy": LossTerm(-entropy.sum() * scale, CONSTANT),
            }
        )

    return loss
