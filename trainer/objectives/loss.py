"""The contract of losses: plain functions of a model's outputs and a micro-batch that return sums, which the engine divides.

A loss returns *sums* over the tokens or sequences of one micro-batch, each with its denominator: the tokens or sequences of the
full mini-batch (`LossDenominators`), or a constant. The engine divides. The gradient of a mini-batch therefore does not depend
on how it is split into calls, ranks and micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, Self

import torch

from ..data.batch import LossDenominators
from ..data.sequences import MicroBatch

OutputName = Literal["logprobs", "entropy", "values", "hidden"]
"""Outputs that can be requested: ``values`` of a model with a value head, ``logprobs`` and ``entropy`` of others."""
LOGPROBS: tuple[OutputName, ...] = ("logprobs",)
"""The output that is computed unless others are requested."""


@dataclass(frozen=True, slots=True)
class ModelOutputs:
    """Outputs of a model for the N tokens of a `MicroBatch`; None for each that was not requested."""

    logprobs: torch.Tensor | None = None
    """float32 [N], or [N, K] for K labels of every position: log-probability of each target; 0 where there is none."""
    entropy: torch.Tensor | None = None
    """float32 [N]: entropy, in nats, of the distribution that the target is drawn from; 0 where there is no target."""
    values: torch.Tensor | None = None
    """float32 [N]: a critic's value of the tokens up to and including each one, before its target; 0 where there is no target."""
    hidden: torch.Tensor | None = None
    """[N, width], in the model's compute dtype: the head's input for each token, with or without a target.

    A rank without sequences computes a token that has no target, so a loss must count only tokens of `MicroBatch.mask`.
    """

    top_tokens: torch.Tensor | None = None
    """int64 [N, k]: the most probable tokens, in descending order; 0 where there is no target."""
    top_logprobs: torch.Tensor | None = None
    """float32 [N, k]: their log-probabilities, without gradient."""

    @classmethod
    def at(cls, rows: torch.Tensor, micro: MicroBatch, found: Mapping[str, torch.Tensor]) -> Self:
        """Expand outputs `found` for the tokens `rows`, those with targets, to all tokens; ``hidden`` has all already."""
        whole = {}
        for name, values in found.items():
            shape = (len(micro.tokens), *values.shape[1:])
            whole[name] = values if name == "hidden" else values.new_zeros(shape).index_copy(0, rows, values)
        return cls(**whole)

    @classmethod
    def nothing(cls, micro: MicroBatch, width: int) -> Self:
        """Return zeros, the outputs of a model of hidden size `width` for a micro-batch without targets."""
        device = micro.tokens.device
        zeros = torch.zeros(micro.tokens.shape, device=device)
        hidden = torch.zeros((*micro.tokens.shape, width), device=device)
        return cls(torch.zeros(micro.targets.shape, device=device), zeros, zeros, hidden)

    def split(self, lengths: Sequence[int]) -> list[Self]:
        """Split the outputs into those of consecutive parts of the micro-batch with `lengths` tokens each."""
        found = {name: value for name in self.__slots__ if (value := getattr(self, name)) is not None}
        split = {name: torch.split(value, list(lengths)) for name, value in found.items()}
        return [type(self)(**{name: parts[at] for name, parts in split.items()}) for at in range(len(lengths))]

    def required(self, name: str) -> torch.Tensor:
        """Return the output `name`. KeyError if it was not requested."""
        found: torch.Tensor | None = getattr(self, name)
        if found is None:
            raise KeyError(f"the loss did not ask for {name}: decorate it with needs({name!r})")
        return found


@dataclass(frozen=True, slots=True)
class LossTerm:
    """A sum over a micro-batch, and its denominator."""

    total: torch.Tensor
    """Scalar with gradient."""
    mean_over: Literal["tokens", "sequences"] | float = "tokens"
    """The denominator: the tokens or the sequences of the full mini-batch, or a constant."""

    def divided(self, denominators: LossDenominators) -> torch.Tensor:
        """Return this micro-batch's contribution to the mini-batch's mean."""
        if isinstance(self.mean_over, str):
            count: float = getattr(denominators, self.mean_over)
            return self.total / max(1.0, count)
        return self.total / self.mean_over


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The result of a loss over one micro-batch."""

    terms: Mapping[str, LossTerm]
    """The loss is the sum of these, each divided; the same names for every micro-batch."""
    metrics: Mapping[str, torch.Tensor | LossTerm] = field(default_factory=dict)
    """Scalars without gradient, the same names for every micro-batch. Each is a sum over targets, reported as the mean over the
    batch's targets; or a `LossTerm`, which is divided like a term of the loss."""


class Loss(Protocol):
    """A loss as the training engine calls it."""

    def __call__(self, outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        """Sum the loss over one micro-batch.

        Args:
            outputs: The model's outputs; see `needs`.
            micro: The tokens, targets and named values. It may have no target at all: every sum is 0 then.
        """


def needs(*outputs: OutputName) -> Callable[[Loss], Loss]:
    """Decorate a loss with the model outputs it needs, if these are not only log-probabilities."""

    def mark(loss: Loss) -> Loss:
        loss.needs = outputs  # type: ignore[attr-defined]
        return loss

    return mark


def needed_outputs(loss: Loss) -> tuple[OutputName, ...]:
    """Return the outputs that `loss` needs."""
    named: tuple[OutputName, ...] = getattr(loss, "needs", LOGPROBS)
    return named


class LossSums:
    """A rank's sums of the loss and the metrics over its micro-batches, before they are summed over the ranks.

    Args:
        denominators: Counts of the mini-batch, by which losses are divided.
    """

    def __init__(self, denominators: LossDenominators) -> None:
        self._denominators = denominators
        self._terms: dict[str, torch.Tensor] = {}
        self._means: dict[str, torch.Tensor] = {}
        self._metrics: dict[str, torch.Tensor] = {}

    def add(self, output: LossOutput) -> torch.Tensor:
        """Add a micro-batch; returns its part of the mini-batch's loss, a scalar with gradient."""
        parts = {name: term.divided(self._denominators) for name, term in output.terms.items()}
        for name, part in parts.items():
            _add(self._terms, name, part)
        for name, value in output.metrics.items():
            if isinstance(value, LossTerm):
                _add(self._means, name, value.divided(self._denominators))
            else:
                _add(self._metrics, name, value)
        return torch.stack(list(parts.values())).sum()

    def as_tensor(self) -> torch.Tensor:
        """Return this rank's sums: float64 [terms + metrics]."""
        return torch.stack([*self._terms.values(), *self._means.values(), *self._metrics.values()])

    def named(self, totals: torch.Tensor, target_tokens: int) -> dict[str, float]:
        """Return the loss and metrics of a batch by name.

        Args:
            totals: `as_tensor`, summed over the ranks.
            target_tokens: Targets of the batch, over all ranks; metrics that are sums over targets are divided by them.

        Returns:
            ``loss``; each term of it as ``loss/name``, if there are several; each metric; and ``tokens``, `target_tokens`.
        """
        values = iter(totals.tolist())
        terms, means, metrics = (
            {name: next(values) for name in sums} for sums in (self._terms, self._means, self._metrics)
        )
        return {
            "loss": sum(terms.values()),
            **({f"loss/{name}": value for name, value in terms.items()} if len(terms) > 1 else {}),
            **means,
            **{name: value / max(1, target_tokens) for name, value in metrics.items()},
            "tokens": float(target_tokens),
        }


def _add(sums: dict[str, torch.Tensor], name: str, value: torch.Tensor) -> None:
    found = value.detach().double()
    sums[name] = sums[name] + found if name in sums else found
