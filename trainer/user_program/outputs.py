"""`ForwardOutput`: a model's outputs for one sequence."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from .inputs import ForwardInput, ForwardInputs


@dataclass(frozen=True, slots=True, eq=False)
class TopK:
    """The most probable next tokens at each of T positions, the most probable first."""

    tokens: torch.Tensor
    """int64 [T, k]."""
    logprobs: torch.Tensor
    """float32 [T, k], without gradient."""


@dataclass(frozen=True, slots=True, eq=False)
class ForwardOutput:
    """Outputs for the T positions of a `ForwardInput`, on the model's device; None for outputs that were not wanted."""

    target_logprobs: torch.Tensor | None = None
    """float32, of the shape of ``target_tokens``: their log-probabilities; 0 where a target is -100."""
    top_k: TopK | None = None
    entropy: torch.Tensor | None = None
    """float32 [T], in nats."""
    logits: torch.Tensor | None = None
    """float32 [T, vocabulary], without temperature."""
    hidden_states: torch.Tensor | None = None
    """The head's input: [T, width], in the dtype that the model computes in."""


ForwardOutputs = ForwardOutput | Sequence["ForwardOutputs"]


def shaped_like(inputs: ForwardInputs, outputs: Iterator[ForwardOutput]) -> ForwardOutputs:
    """Take an output for every input, and nest the outputs like the inputs."""
    if isinstance(inputs, ForwardInput):
        return next(outputs)
    return [shaped_like(each, outputs) for each in inputs]
