"""Training batches: samples, their split over ranks, and micro batches as padded tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from weightlane.ckpt_engines import ProtocolError

_PART = "training batch"


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion with what its rollout and its reward said about it.

    Raises `ProtocolError` when lengths disagree, the prompt or the completion is empty, or a number is NaN or infinite.
    """

    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    rollout_logprobs: tuple[float, ...]
    """Log-probability of each completion token under the policy that sampled it, at the sampling temperature."""
    advantage: float
    """Advantage of the whole completion; every token of it carries the same."""
    masked: int = 0
    """Number of leading completion tokens that are left out of the loss; at least one token counts."""

    def __post_init__(self) -> None:
        if not self.prompt_ids or not self.completion_ids:
            raise ProtocolError("a sample needs at least one prompt token and one completion token.", part=_PART)
        if not 0 <= self.masked < len(self.completion_ids):
            raise ProtocolError(
                f"{self.masked} of {len(self.completion_ids)} completion tokens are masked.", part=_PART
            )
        if len(self.rollout_logprobs) != len(self.completion_ids):
            raise ProtocolError(
                f"{len(self.completion_ids)} completion tokens came with {len(self.rollout_logprobs)} log-probabilities.",
                part=_PART,
            )
        for index, value in enumerate(self.rollout_logprobs):
            if not math.isfinite(value):
                raise ProtocolError(
                    f"the rollout's log-probability of completion token {index} (id {self.completion_ids[index]}) is {value}.",
                    part=_PART,
                    hint="The rollout's weights or sampling settings are broken; a policy trained on this would be too.",
                )
        if not math.isfinite(self.advantage):
            raise ProtocolError(f"a sample has advantage {self.advantage}.", part=_PART, hint="Check its reward.")

    @classmethod
    def supervised(cls, prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> Self:
        """A sample for supervised fine-tuning: no rollout, advantage 1."""
        return cls(tuple(prompt_ids), tuple(completion_ids), (0.0,) * len(completion_ids), 1.0)

    @property
    def length(self) -> int:
        """Tokens of prompt and completion."""
        return len(self.prompt_ids) + len(self.completion_ids)

    @property
    def loss_tokens(self) -> int:
        """Completion tokens that count in the loss."""
        return len(self.completion_ids) - self.masked


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The tensors of one forward pass: B right-padded sequences of T tokens, and their last A = T - `first_target` positions.

    A token is a *target* when the model is asked for its log-probability; only the tail that some completion reaches is
    kept. `first_target` is at least 1, since the first token has no logits.
    """

    input_ids: torch.Tensor
    """int64 [B, T]."""
    attention_mask: torch.Tensor
    """int64 [B, T]: 1 on tokens, 0 on padding."""
    first_target: int
    """Position of the first target."""
    loss_mask: torch.Tensor
    """bool [B, A]: True on completion tokens."""
    rollout_logprobs: torch.Tensor
    """float32 [B, A]; 0 outside the mask."""
    advantages: torch.Tensor
    """float32 [B, A]; 0 outside the mask."""

    @property
    def targets(self) -> torch.Tensor:
        """int64 [B, A]: the tokens whose log-probability counts."""
        return self.input_ids[:, self.first_target :]

    @classmethod
    def from_samples(cls, samples: Sequence[Sample]) -> Self:
        """Pad `samples` to the longest of them. Padding ids are 0: nothing reads the outputs there."""
        rows, length = len(samples), max(sample.length for sample in samples)
        first_target = min(len(sample.prompt_ids) for sample in samples)
        input_ids = torch.zeros(rows, length, dtype=torch.int64)
        attention_mask = torch.zeros(rows, length, dtype=torch.int64)
        loss_mask = torch.zeros(rows, length, dtype=torch.bool)
        logprobs = torch.zeros(rows, length)
        advantages = torch.zeros(rows, length)
        for row, sample in enumerate(samples):
            completion = slice(len(sample.prompt_ids) + sample.masked, sample.length)
            input_ids[row, : sample.length] = torch.tensor(sample.prompt_ids + sample.completion_ids)
            attention_mask[row, : sample.length] = 1
            loss_mask[row, completion] = True
            logprobs[row, completion] = torch.tensor(sample.rollout_logprobs[sample.masked :])
            advantages[row, completion] = sample.advantage
        tail = slice(first_target, None)
        return cls(input_ids, attention_mask, first_target, loss_mask[:, tail], logprobs[:, tail], advantages[:, tail])

    @classmethod
    def empty(cls) -> Self:
        """A micro batch of weight zero: a rank that ran out of samples still takes part in every collective."""
        ones = torch.ones(1, 2, dtype=torch.int64)
        return cls(
            torch.zeros_like(ones), ones, 1, torch.zeros(1, 1, dtype=torch.bool), torch.zeros(1, 1), torch.zeros(1, 1)
        )

    def padded_to_multiple(self, multiple: int) -> Self:
        """The same micro batch with T a multiple of `multiple`, by more padding on the right."""
        extra = -self.input_ids.shape[1] % multiple
        if not extra:
            return self

        def pad(tensor: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(tensor, (0, extra))

        return replace(
            self,
            input_ids=pad(self.input_ids),
            attention_mask=pad(self.attention_mask),
            loss_mask=pad(self.loss_mask),
            rollout_logprobs=pad(self.rollout_logprobs),
            advantages=pad(self.advantages),
        )

    def to(self, device: torch.device) -> Self:
        """The same micro batch with its tensors on `device`."""
        return replace(
            self,
            input_ids=self.input_ids.to(device),
            attention_mask=self.attention_mask.to(device),
            loss_mask=self.loss_mask.to(device),
            rollout_logprobs=self.rollout_logprobs.to(device),
            advantages=self.advantages.to(device),
        )


@dataclass(frozen=True, slots=True)
class TrainBatch:
    """The samples of one optimizer step, all ranks together. Every rank is handed the same batch and takes its own share."""

    samples: tuple[Sample, ...]
    temperature: float = 1.0
    """Sampling temperature of the rollout; the policy's logits are divided by it."""
    left_out_tokens: int = 0
    """Completion tokens of samples that are not here because their advantage, and so their gradient, is 0."""

    def __post_init__(self) -> None:
        if not self.samples:
            raise ProtocolError("a training batch needs at least one sample.", part=_PART)

    @property
    def loss_tokens(self) -> int:
        """Divisor of the summed loss: all completion tokens, those that were left out included."""
        return self.computed_tokens + self.left_out_tokens

    @property
    def computed_tokens(self) -> int:
        """Completion tokens that go through the loss; the divisor of its summed metrics."""
        return sum(sample.loss_tokens for sample in self.samples)

    def split(self, world: int) -> list[list[Sample]]:
        """The samples of each of `world` ranks: disjoint, together complete, balanced by tokens, the same on every rank.

        Longest first, each to the rank with the fewest tokens so far (lowest rank on a tie). A rank's list may be empty.
        """
        shares: list[list[Sample]] = [[] for _ in range(world)]
        loads = [0] * world
        for sample in sorted(self.samples, key=lambda sample: -sample.length):
            rank = loads.index(min(loads))
            shares[rank].append(sample)
            loads[rank] += sample.length
        return shares

    def micro_batches(self, rank: int, world: int, max_tokens: int) -> list[MicroBatch]:
        """The micro batches of `rank`: as many on every rank, the missing ones empty.

        Each holds at most `max_tokens` tokens including padding, except where a single sample is longer than that.
        """
        plans = [_pack(share, max_tokens) for share in self.split(world)]
        count = max(len(plan) for plan in plans)
        mine = [MicroBatch.from_samples(samples) for samples in plans[rank]]
        return mine + [MicroBatch.empty() for _ in range(count - len(mine))]


def _pack(samples: Sequence[Sample], max_tokens: int) -> list[list[Sample]]:
    """Cut `samples`, sorted longest first, into runs whose padded size stays within `max_tokens`."""
    packs: list[list[Sample]] = []
    for sample in samples:
        if packs and (len(packs[-1]) + 1) * packs[-1][0].length <= max_tokens:
            packs[-1].append(sample)
        else:
            packs.append([sample])
    return packs
