"""Inputs and results of both implementations of the head: the head itself, sums over its logits, derivatives of a loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True)
class LogitTransform:
    """The last step of a model, after its head: logits become ``softcap * tanh(scale * logits / softcap)``.

    Without a softcap they become ``scale * logits``.
    """

    scale: float = 1.0
    softcap: float | None = None

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the transformed `logits`."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap

    def times_slope(self, gradient: torch.Tensor, transformed: torch.Tensor) -> torch.Tensor:
        """Turn the gradient by transformed logits into that by the head's logits, in place of `gradient`."""
        if self.softcap is not None:
            gradient *= 1 - (transformed / self.softcap).square()
        return gradient.mul_(self.scale) if self.scale != 1.0 else gradient


@dataclass(frozen=True, slots=True)
class VocabularyShare:
    """The rows of the head that this rank holds."""

    first: int
    """Token of the first row."""
    group: dist.ProcessGroup
    """The ranks that together hold all rows."""


@dataclass(frozen=True, slots=True)
class HeadTerms:
    """The tensors and numbers that make logits; see `head_outputs`."""

    hidden: torch.Tensor
    """[rows, width]."""
    weight: torch.Tensor
    """[vocabulary, width], this rank's rows of it, in the dtype of `hidden`."""
    bias: torch.Tensor | None
    """[vocabulary]."""
    temperatures: torch.Tensor | None
    """float32 [rows]."""
    transform: LogitTransform


@dataclass(frozen=True, slots=True)
class LogitSums:
    """Sums over the logits of this rank's part of the vocabulary, after transform and temperature; float32."""

    log_sum: torch.Tensor
    """[rows], the logarithm of the sum of exponentials."""
    entropy: torch.Tensor
    """[rows], of the distribution over this part of the vocabulary, in nats; zeros if it was not asked for."""
    chosen: torch.Tensor
    """[rows, labels], logits of the labels; 0 for labels that this rank does not hold."""
    best: torch.Tensor
    """int64 [rows, k], keys of the largest logits, see `top_tokens`."""


@dataclass(frozen=True, slots=True)
class LossSlopes:
    """The derivatives of a loss by the head's outputs, and the sums that turn them into derivatives by logits.

    With logits z, their probabilities p and the entropy H: the gradient of a target's log-probability by z is
    ``[z is the target's] - p``, and that of the entropy is ``-p (log p + H)``.
    """

    labels: torch.Tensor
    """int64 [rows, labels], rows of this rank's weight, or -1."""
    log_sum: torch.Tensor
    """float32 [rows], over the full vocabulary."""
    entropy: torch.Tensor
    """float32 [rows], of the full vocabulary."""
    by_label: torch.Tensor
    """float32 [rows, labels], by the log-probabilities of `labels`; 0 where these are -1."""
    by_all: torch.Tensor
    """float32 [rows], by the sum of the log-probabilities of all labels that are not `IGNORED`, also those of other ranks."""
    by_entropy: torch.Tensor | None
    """float32 [rows], or None if no entropy was asked for."""


Gradients = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
"""Gradients by hidden states, weight and bias; None for each that is not wanted."""
