"""A group: one prompt, several completions, their rewards; the unit the loop generates and trains on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .batch import Sample, TrainBatch
from .losses import group_advantages
from .protocols import Completion
from .tasks import Task


@dataclass(frozen=True, slots=True)
class Group:
    """Completions of one task's prompt, judged."""

    task: Task
    prompt_ids: Sequence[int]
    completions: Sequence[Completion]
    rewards: Sequence[float]
    replica: str
    """Name of the replica that generated it."""

    @property
    def oldest_version(self) -> int:
        """The oldest weight version that produced one of its tokens."""
        return min(version for completion in self.completions for version in completion.versions)

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(len(completion.token_ids) for completion in self.completions)


def to_batch(groups: Sequence[Group], *, normalize_std: bool, temperature: float) -> TrainBatch:
    """The groups as one training batch, advantages computed within each group."""
    rewards = torch.tensor([list(group.rewards) for group in groups])
    advantages = group_advantages(rewards, normalize_std=normalize_std)
    samples = [
        Sample(
            tuple(group.prompt_ids),
            tuple(completion.token_ids),
            tuple(completion.logprobs),
            float(advantage),
        )
        for group, row in zip(groups, advantages, strict=True)
        for completion, advantage in zip(group.completions, row, strict=True)
    ]
    return TrainBatch(tuple(samples), temperature=temperature)


def staleness(groups: Sequence[Group], step: int) -> tuple[float, int]:
    """Mean over tokens, and maximum, of ``step`` minus the version that generated each token."""
    lags = [step - version for group in groups for completion in group.completions for version in completion.versions]
    return sum(lags) / len(lags), max(lags)
