"""`MicroBatch`: the part of a program's inputs that a rank computed at once, and what the model said about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from .inputs import ForwardInputs
from .outputs import ForwardOutputs

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class MicroBatchStats:
    """How a micro-batch was chosen. Numbers of bytes are of the rank for which they are largest or, if free, smallest."""

    first: int
    """The first of the items that all data parallel ranks computed together."""
    items: int
    """How many of these there were."""
    tokens: int
    """Tokens that this rank computed."""
    predicted_bytes: int
    """Memory that the pass was expected to take, outputs and what the gradient needs included."""
    available_bytes: int
    """Memory that there was for it."""
    measured_bytes: int
    """Memory that it took on this rank, as far as it could be measured."""


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some of the items that were given to `TrainerRank.forward_micro_batches`, computed."""

    inputs: Sequence[ForwardInputs]
    """This rank's items; none, if there are fewer of them than ranks."""
    outputs: Sequence[ForwardOutputs]
    """For each of them its outputs, nested in the same way."""
    indices: Sequence[int]
    """Where each of them is among the items that were given."""
    stats: MicroBatchStats

    def select(self, values: Sequence[_Item]) -> list[_Item]:
        """Pick from `values`, one for each item that was given, those of this micro-batch."""
        return [values[index] for index in self.indices]
