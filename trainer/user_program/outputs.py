"""`ForwardOutput`, a model's outputs for one sequence, and `MicroBatch`, the inputs that a rank computed at once with theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from .inputs import ForwardInput, ForwardInputs

_Item = TypeVar("_Item")


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


@dataclass(frozen=True, slots=True)
class MicroBatchStats:
    """How a micro-batch was chosen. Bytes are of the rank that needs most or, for available memory, has least."""

    first: int
    """Index of the first of the items that all data parallel ranks computed together."""
    items: int
    """Number of these items."""
    tokens: int
    """Tokens that this rank computed."""
    predicted_bytes: int
    """Memory that the pass was predicted to take, with outputs and tensors kept for the gradient."""
    available_bytes: int
    """Memory that was available for it."""
    measured_bytes: int
    """Memory that it took on this rank, if it was measured."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some of the items of `TrainerRank.forward_micro_batches`, with their outputs."""

    inputs: Sequence[ForwardInputs]
    """This rank's items; empty if there are fewer items than ranks."""
    outputs: Sequence[ForwardOutputs]
    """The outputs of each item, nested in the same way."""
    indices: Sequence[int]
    """The index of each item among all items."""
    stats: MicroBatchStats

    def select(self, values: Sequence[_Item]) -> list[_Item]:
        """Pick this micro-batch's values from `values`, which has one for each of all items."""
        return [values[index] for index in self.indices]


def shaped_like(inputs: ForwardInputs, outputs: Iterator[ForwardOutput]) -> ForwardOutputs:
    """Take an output for every input, and nest the outputs like the inputs."""
    if isinstance(inputs, ForwardInput):
        return next(outputs)
    return [shaped_like(each, outputs) for each in inputs]
