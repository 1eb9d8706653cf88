"""`MicroBatch`: the part of a program's inputs that a rank computed at once, with its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from .inputs import ForwardInputs
from .outputs import ForwardOutputs

_Item = TypeVar("_Item")


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
