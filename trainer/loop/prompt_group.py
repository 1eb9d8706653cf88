"""`PromptGroup`: one prompt, several completions, their rewards; the unit that the loop generates and trains on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from ..data.batch import LossDenominators, MiniBatch, TokenBatch
from ..data.sequences import IGNORED, TEMPERATURE, TokenSequence
from ..data.tasks import Task
from ..objectives.advantages import group_advantages
from ..objectives.config import AlgorithmConfig
from ..objectives.policy_values import ADVANTAGES, REWARD, ROLLOUT_LOGPROBS
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


def to_batch(
    groups: Sequence[PromptGroup], algorithm: AlgorithmConfig, oldest: int | None = None
) -> tuple[TokenBatch, list[MiniBatch]]:
    """Return the groups as one training batch, with advantages computed within each group, and its mini-batches.

    Sequences with advantage 0 are left out, unless `algorithm` says otherwise or adds a term that gives them a gradient. They
    count in the denominators.

    Each group has two completions or more. Tokens of versions older than `oldest` are not targets.
    """
    size = algorithm.mini_batch_prompts or len(groups)
    parts = [_mini_batch(groups[start : start + size], algorithm, oldest) for start in range(0, len(groups), size)]
    sequences = tuple(sequence for kept, _ in parts for sequence in kept)
    return TokenBatch(sequences), [MiniBatch(len(kept), denominators) for kept, denominators in parts]


def _mini_batch(
    groups: Sequence[PromptGroup], algorithm: AlgorithmConfig, oldest: int | None
) -> tuple[list[TokenSequence], LossDenominators]:
    judged = [each for group in groups for each in _sequences(group, algorithm, oldest)]
    if not judged:  # every token is too old, but a batch needs a sequence
        _, sequence = next(_sequences(groups[0], algorithm, None))
        judged = [(0.0, replace(sequence, targets=torch.full_like(sequence.targets, IGNORED)))]
    every = [sequence for _, sequence in judged]
    kept = every
    if algorithm.leaves_out_zero_advantages:
        kept = [sequence for advantage, sequence in judged if advantage]
        kept = kept or [min(every, key=lambda sequence: sequence.length)]
    return kept, LossDenominators.of_sequences(every)


def _sequences(
    group: PromptGroup, algorithm: AlgorithmConfig, oldest: int | None
) -> Iterator[tuple[float, TokenSequence]]:
    """Yield advantage and sequence of every completion of a group that has a target."""
    rewards = torch.tensor([list(group.rewards)], dtype=torch.float64)
    (advantages,) = group_advantages(rewards, normalize_std=algorithm.normalize_std).tolist()
    for completion, advantage, reward in zip(group.completions, advantages, group.rewards, strict=True):
        masked = 0 if oldest is None else sum(version < oldest for version in completion.versions)
        if masked < len(completion.token_ids):
            yield (
                advantage,
                TokenSequence.of_completion(
                    group.prompt_ids,
                    completion.token_ids,
                    masked=masked,
                    per_token={ROLLOUT_LOGPROBS: completion.logprobs, ADVANTAGES: advantage},
                    per_sequence={TEMPERATURE: algorithm.temperature, REWARD: reward},
                ),
            )


def version_runs(versions: Sequence[int]) -> list[list[int]]:
    """The version of every token as pairs: a version, and how many tokens in a row it generated."""
    return [[version, len(list(run))] for version, run in groupby(versions)]


def staleness(groups: Sequence[PromptGroup], step: int) -> tuple[float, int]:
    """Mean over tokens, and maximum, of ``step`` minus the version that generated each token."""
    lags = [step - version for group in groups for completion in group.completions for version in completion.versions]
    return sum(lags) / len(lags), max(lags)
