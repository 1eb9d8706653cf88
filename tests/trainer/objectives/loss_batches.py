"""Micro-batches in float64, and the numbers of their targets, for tests of losses against formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from weightlane.trainer.data.sequences import MicroBatch, TokenSequence

PROMPT = [1, 2]
TARGET = 3


def completion(length: int, masked: int = 0, **per_token: Any) -> TokenSequence:
    """A completion of `length` tokens of which the first `masked` are no targets."""
    return TokenSequence.of_completion(PROMPT, [TARGET] * length, masked=masked, per_token=per_token)


def in_float64(micro: MicroBatch) -> MicroBatch:
    object.__setattr__(micro, "per_token", {name: each.double() for name, each in micro.per_token.items()})
    return micro


def at_targets(micro: MicroBatch, values: Sequence[float], elsewhere: float = 0.0) -> torch.Tensor:
    """A float64 leaf that holds `values` where `micro` has targets."""
    found = torch.full(micro.targets.shape, elsewhere, dtype=torch.float64)
    found[micro.mask] = torch.tensor(values, dtype=torch.float64)
    return found.requires_grad_()


def slopes_at_targets(leaf: torch.Tensor, micro: MicroBatch) -> list[float]:
    """The gradient of `leaf` at the targets. It must be zero elsewhere."""
    assert leaf.grad is not None
    assert not bool(leaf.grad[~micro.mask].any())
    found: list[float] = leaf.grad[micro.mask].tolist()
    assert all(map(math.isfinite, found))
    return found
