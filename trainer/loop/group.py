"""`PromptGroup`: one prompt, several completions, their rewards; the unit that the loop generates and trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from ..config import AlgorithmConfig
from ..data.batch import Sample, TrainBatch
from ..data.tasks import Task
from ..objectives.losses import group_advantages
from .protocols import Completion


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Completions of one task's prompt, judged."""

    task: Task
    prompt_ids: Sequence[int]
    completions: Sequence[Completion]
    """Completions that were generated and judged; there may be fewer than were asked for."""
    texts: Sequence[str]
    """Text of each completion."""
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


def to_batch(groups: Sequence[PromptGroup], algorithm: AlgorithmConfig, oldest: int | None = None) -> TrainBatch:
    """The groups as one training batch, advantages computed within each group.

    Samples with advantage 0 are left out, unless `algorithm` says otherwise: they have no gradient.

    Args:
        groups: Each has two completions or more.
        algorithm: How advantages are scaled, and the temperature.
        oldest: Tokens of older versions are left out of the loss; None to leave out none.
    """
    samples = [sample for group in groups for sample in _samples(group, algorithm, oldest)]
    if not samples:  # every token is too old; a batch has a sample
        samples = [replace(sample, advantage=0.0) for sample in _samples(groups[0], algorithm, None)][:1]
    if algorithm.compute_zero_advantage:
        return TrainBatch(tuple(samples), temperature=algorithm.temperature)
    kept = [sample for sample in samples if sample.advantage] or [min(samples, key=lambda sample: sample.length)]
    left_out = sum(sample.loss_tokens for sample in samples) - sum(sample.loss_tokens for sample in kept)
    return TrainBatch(tuple(kept), temperature=algorithm.temperature, left_out_tokens=left_out)


def _samples(group: PromptGroup, algorithm: AlgorithmConfig, oldest: int | None) -> Iterator[Sample]:
    """Samples of a group that have a token in the loss."""
    rewards = torch.tensor([list(group.rewards)], dtype=torch.float64)
    (advantages,) = group_advantages(rewards, normalize_std=algorithm.normalize_std).tolist()
    prompt = tuple(group.prompt_ids)
    for completion, advantage in zip(group.completions, advantages, strict=True):
        masked = 0 if oldest is None else sum(version < oldest for version in completion.versions)
        if masked < len(completion.token_ids):
            yield Sample(prompt, tuple(completion.token_ids), tuple(completion.logprobs), advantage, masked)


def staleness(groups: Sequence[PromptGroup], step: int) -> tuple[float, int]:
    """Mean over tokens, and maximum, of ``step`` minus the version that generated each token."""
    lags = [step - version for group in groups for completion in group.completions for version in completion.versions]
    return sum(lags) / len(lags), max(lags)
