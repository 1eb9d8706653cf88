"""`PromptGroup`: one task, several episodes, their rewards; the unit that the loop generates and trains on."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from ..data.batch import LossDenominators, MiniBatch, TokenBatch
from ..data.sequences import IGNORED, ROUTED_EXPERTS, TEMPERATURE, TokenSequence
from ..data.tasks import Task
from ..objectives.config import AlgorithmConfig
from ..objectives.named_advantages import Advantages, NamedAdvantages, ScoredGroup
from ..objectives.policy_values import ADVANTAGES, REWARD, ROLLOUT_LOGPROBS
from .protocols import Played, Trajectory
from .sampling.overlong import length_penalty


@dataclass(frozen=True, slots=True)
class PromptGroup:
    """Episodes of one task, judged."""

    task: Task
    episodes: Sequence[Played]
    """Episodes that were generated and judged; there may be fewer than were asked for."""
    replica: str
    """Name of the replica that generated it."""
    overlong: Collection[int] = ()
    """Places of those episodes whose last turn was cut off."""
    dropped: Sequence[Played] = ()
    """Overlong episodes that were dropped from the group."""

    @property
    def completions(self) -> list[Trajectory]:
        """The turns of each episode."""
        return [episode.trajectory for episode in self.episodes]

    @property
    def rewards(self) -> list[float]:
        """The reward of each episode."""
        return [episode.reward for episode in self.episodes]

    @property
    def oldest_version(self) -> int:
        """The oldest weight version that produced one of its tokens."""
        return min(version for completion in self.completions for version in completion.versions)

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(len(completion.token_ids) for completion in self.completions)

    def without_overlong(self) -> PromptGroup:
        """Return the group of the other completions."""
        kept = [place for place in range(len(self.episodes)) if place not in self.overlong]
        return replace(
            self,
            episodes=[self.episodes[place] for place in kept],
            overlong=(),
            dropped=[self.episodes[place] for place in self.overlong],
        )

    def scored(self, algorithm: AlgorithmConfig) -> ScoredGroup:
        """Return what advantages are computed from."""
        lengths = [len(completion.token_ids) for completion in self.completions]
        rewards = [
            reward + length_penalty(length, algorithm) for reward, length in zip(self.rewards, lengths, strict=True)
        ]
        cut_off = [place in self.overlong for place in range(len(lengths))]
        return ScoredGroup(rewards, lengths, cut_off, self.task.as_mapping())

    def has_signal(self, algorithm: AlgorithmConfig) -> bool:
        """Whether advantages relative to the group are not 0 where it has targets."""
        all_masked = algorithm.overlong == "mask" and len(self.overlong) == len(self.completions)
        return self.scored(algorithm).differs and not all_masked


def to_batch(
    groups: Sequence[PromptGroup],
    algorithm: AlgorithmConfig,
    oldest: int | None = None,
    advantages: Advantages | None = None,
) -> tuple[TokenBatch, list[MiniBatch]]:
    """Return the groups as one training batch and its mini-batches.

    Advantages are computed by `advantages`, from all groups; None: by the function that `algorithm` names. Sequences with
    advantage 0 are left out, unless `algorithm` says otherwise or adds a term that gives them a gradient. They count in the
    denominators.

    Each group has two completions or more. Tokens of versions older than `oldest` are not targets, nor are those of completions
    that `algorithm` masks.
    """
    scored = [group.scored(algorithm) for group in groups]
    found = (advantages or NamedAdvantages(algorithm))(scored)
    judged = [
        list(_sequences(group, each.rewards, values, algorithm, oldest))
        for group, each, values in zip(groups, scored, found, strict=True)
    ]
    size = algorithm.mini_batch_prompts or len(groups)
    parts = [
        _mini_batch(groups[start], judged[start : start + size], algorithm) for start in range(0, len(groups), size)
    ]
    sequences = tuple(sequence for kept, _ in parts for sequence in kept)
    return TokenBatch(sequences), [MiniBatch(len(kept), denominators) for kept, denominators in parts]


def _mini_batch(
    first: PromptGroup, groups: Sequence[Sequence[tuple[float, TokenSequence]]], algorithm: AlgorithmConfig
) -> tuple[list[TokenSequence], LossDenominators]:
    """Return the sequences of one optimizer step that are computed; `first` is the first of its groups."""
    judged = [each for group in groups for each in group]
    if not judged:  # no token is a target, but a batch needs a sequence
        sequence = _sequence(first.completions[0].sequences[0], 0.0, 0.0, algorithm)
        judged = [(0.0, replace(sequence, targets=torch.full_like(sequence.targets, IGNORED)))]
    every = [sequence for _, sequence in judged]
    kept = every
    if algorithm.leaves_out_zero_advantages:
        kept = [sequence for advantage, sequence in judged if advantage]
        kept = kept or [min(every, key=lambda sequence: sequence.length)]
    return kept, LossDenominators.of_sequences(every)


def _sequences(
    group: PromptGroup,
    rewards: Sequence[float],
    advantages: Sequence[float],
    algorithm: AlgorithmConfig,
    oldest: int | None,
) -> Iterator[tuple[float, TokenSequence]]:
    """Yield advantage and sequence of every sequence of a group's completions that has a target."""
    for place, (completion, reward, advantage) in enumerate(zip(group.completions, rewards, advantages, strict=True)):
        if algorithm.overlong == "mask" and place in group.overlong:
            continue
        for turns in completion.sequences:
            masked = 0 if oldest is None else sum(version < oldest for version in turns.versions)
            if masked < len(turns.token_ids):
                yield advantage, _sequence(turns, reward, advantage, algorithm, masked)


def _sequence(
    turns: Trajectory, reward: float, advantage: float, algorithm: AlgorithmConfig, masked: int = 0
) -> TokenSequence:
    sequence = TokenSequence.of_turns(
        [(turn.read_ids, turn.completion.token_ids) for turn in turns.turns],
        masked=masked,
        per_token={ROLLOUT_LOGPROBS: turns.logprobs, ADVANTAGES: advantage},
        per_sequence={TEMPERATURE: algorithm.temperature, REWARD: reward},
    )
    if not algorithm.router_replay:
        return sequence
    experts = torch.from_numpy(turns.routed_experts)
    return replace(sequence, per_token={**sequence.per_token, ROUTED_EXPERTS: experts})


def version_runs(versions: Sequence[int]) -> list[list[int]]:
    """The version of every token as pairs: a version, and how many tokens in a row it generated."""
    return [[version, len(list(run))] for version, run in groupby(versions)]


def staleness(groups: Sequence[PromptGroup], step: int) -> tuple[float, int]:
    """Mean over tokens, and maximum, of ``step`` minus the version that generated each token."""
    lags = [step - version for group in groups for completion in group.completions for version in completion.versions]
    return sum(lags) / len(lags), max(lags)


def episode_figures(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Return the means of a step's episodes that only an environment has.

    ``turns``, ``sequences`` and ``read_between_turns`` (tokens read after a first prompt) of an episode; ``full`` and
    ``out_of_turns``, the shares of episodes that were cut short; ``prefix_reuse``, the share of the tokens of earlier turns that
    later turns found in the engine's cache, where the engine says so; and ``environment/NAME`` for the environment's own metrics.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    sequences = [sequence.turns for episode in episodes for sequence in episode.trajectory.sequences]
    read, reused, reusable = 0, 0, 0
    for each in sequences:
        before = len(each[0].read_ids) + len(each[0].completion.token_ids)
        for turn in each[1:]:
            read += len(turn.read_ids)
            if turn.completion.cached_tokens is not None:
                reused, reusable = reused + min(before, turn.completion.cached_tokens), reusable + before
            before += len(turn.read_ids) + len(turn.completion.token_ids)
    own: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            own.setdefault(f"environment/{name}", []).append(float(value))
    count = len(episodes)
    return {
        "turns": sum(map(len, sequences)) / count,
        "sequences": len(sequences) / count,
        "read_between_turns": read / count,
        "full": sum(episode.ended == "full" for episode in episodes) / count,
        "out_of_turns": sum(episode.ended == "turns" for episode in episodes) / count,
        **({"prefix_reuse": reused / reusable} if reusable else {}),
        **{name: sum(values) / len(values) for name, values in own.items()},
    }
