"""`TokenBatch`: the sequences of a call, checked; `MiniBatch`, the part of a batch for one step; and `LossDenominators` of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import torch

from weightlane.ckpt_engines import ProtocolError

from .sequences import IGNORED, MicroBatch, TokenSequence

_PART = "training batch"
_NO_TOKEN = f"Tokens are numbers from 0; targets that do not count are {IGNORED}."
_NO_NUMBER = "A model trained on this would be broken, too; look at what computed it."


@dataclass(frozen=True, slots=True)
class LossDenominators:
    """Tokens and sequences of a full mini-batch, by which its losses are divided, however it is split.

    They are fixed before the first forward pass of an optimizer step. Tokens or sequences whose gradient is known to be 0 may be
    counted here and left out of the batches.
    """

    tokens: float
    """Positions with a target."""
    sequences: float

    @classmethod
    def of(cls, *batches: TokenBatch) -> Self:
        """Count a mini-batch that consists of `batches`."""
        return cls.of_sequences([sequence for batch in batches for sequence in batch.sequences])

    @classmethod
    def of_sequences(cls, sequences: Sequence[TokenSequence]) -> Self:
        """Count a mini-batch of these sequences."""
        return cls(float(sum(sequence.target_tokens for sequence in sequences)), float(len(sequences)))


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """The part of a batch for one optimizer step: the next `sequences` of it."""

    sequences: int
    denominators: LossDenominators


@dataclass(frozen=True, eq=False)
class TokenBatch:
    """A list of sequences, all with values of the same names and shapes. Outputs are in the same order.

    Raises `ProtocolError`, naming sequence, tensor and index, when there is no sequence, when sequences differ in what they
    carry, when a target is neither a token nor `IGNORED`, or when a value is NaN or infinite. It does so, too, when the number
    of sequences is no multiple of `sequences_per_unit`.
    """

    sequences: tuple[TokenSequence, ...]
    sequences_per_unit: int = 1
    """Sequences in a unit, which is never split: each unit is in one micro-batch, in its order. 2 for pairs."""

    def __post_init__(self) -> None:
        if not self.sequences:
            raise ProtocolError("a training batch needs at least one sequence.", part=_PART)
        if self.sequences_per_unit < 1 or len(self.sequences) % self.sequences_per_unit:
            raise ProtocolError(
                f"{len(self.sequences)} sequences are no whole units of {self.sequences_per_unit}.",
                part=_PART,
                hint="Give a multiple of `sequences_per_unit`, which is at least 1.",
            )
        carried = [_kinds(sequence) for sequence in self.sequences]
        for index, kinds in enumerate(carried):
            if kinds != carried[0]:
                odd = sorted(name for name in {*kinds, *carried[0]} if kinds.get(name) != carried[0].get(name))
                raise ProtocolError(
                    f"sequence {index} and sequence 0 differ in {', '.join(odd)}.",
                    part=_PART,
                    hint="All sequences of a batch carry values of the same names, types and shapes.",
                )
        packed = self.packed
        _refuse(packed, "token", packed.tokens, packed.tokens < 0, _NO_TOKEN)
        _refuse(packed, "target", packed.targets, (packed.targets < 0) & (packed.targets != IGNORED), _NO_TOKEN)
        for name, tensor in packed.per_token.items():
            if tensor.is_floating_point():
                _refuse(packed, name, tensor, ~torch.isfinite(tensor), _NO_NUMBER)
        for name, tensor in packed.per_sequence.items():
            for index in (~torch.isfinite(tensor)).nonzero().flatten().tolist():
                raise ProtocolError(
                    f"{name} of sequence {index} is {float(tensor[index])}.", part=_PART, hint=_NO_NUMBER
                )

    def __reduce__(self) -> tuple[Any, ...]:
        return unpacked_batch, (self.packed,)  # a few large tensors instead of thousands of small ones

    def __len__(self) -> int:
        return len(self.sequences)

    @cached_property
    def packed(self) -> MicroBatch:
        """All sequences, packed one after the other."""
        return MicroBatch.of(self.sequences, self.sequences_per_unit)

    @property
    def target_tokens(self) -> int:
        """Positions with a target, over all sequences."""
        return int(self.packed.mask.sum())

    def with_values(self, name: str, values: Sequence[torch.Tensor]) -> TokenBatch:
        """Return the same batch with one more per-token value, replacing an older one of that name.

        `values` are [T] or [T, ...] for each sequence, in the order of the batch.
        """
        return replace(
            self,
            sequences=tuple(
                replace(sequence, per_token={**sequence.per_token, name: each})
                for sequence, each in zip(self.sequences, values, strict=True)
            ),
        )

    def split(self, mini_batches: Sequence[MiniBatch]) -> list[tuple[TokenBatch, LossDenominators]]:
        """Return the mini-batches as batches of their own, with their denominators; without any, all of this batch is one.

        Raises `ProtocolError` unless they have as many sequences as the batch.
        """
        if not mini_batches:
            return [(self, LossDenominators.of(self))]
        if (counted := sum(part.sequences for part in mini_batches)) != len(self):
            raise ProtocolError(
                f"the mini-batches have {counted} sequences, and the batch has {len(self)}.",
                part=_PART,
                hint="Every sequence of a batch is in one of its mini-batches.",
            )
        stops = accumulate(part.sequences for part in mini_batches)
        return [
            (replace(self, sequences=self.sequences[stop - part.sequences : stop]), part.denominators)
            for stop, part in zip(stops, mini_batches, strict=True)
        ]

    def check_vocabulary(self, size: int) -> None:
        """Raise `ProtocolError` for the first token or target that a model of `size` tokens doesn't have."""
        hint = f"The model has tokens 0 to {size - 1}: use its own tokenizer."
        _refuse(self.packed, "token", self.packed.tokens, self.packed.tokens >= size, hint)
        _refuse(self.packed, "target", self.packed.targets, self.packed.targets >= size, hint)


def unpacked_batch(packed: MicroBatch) -> TokenBatch:
    """Return the batch whose sequences are packed in `packed`."""
    values = {name: packed.split(tensor) for name, tensor in packed.per_token.items()}
    whole = {name: tensor.tolist() for name, tensor in packed.per_sequence.items()}
    return TokenBatch(
        tuple(
            TokenSequence(
                tokens,
                targets,
                {name: tensors[index] for name, tensors in values.items()},
                {name: numbers[index] for name, numbers in whole.items()},
            )
            for index, (tokens, targets) in enumerate(
                zip(packed.split(packed.tokens), packed.split(packed.targets), strict=True)
            )
        ),
        packed.sequences_per_unit,
    )


def _refuse(packed: MicroBatch, name: str, tensor: torch.Tensor, wrong: torch.Tensor, hint: str) -> None:
    """Raise `ProtocolError` for the first token with an entry of `tensor` that is `wrong`; both are [N] or [N, ...]."""
    if not bool(wrong.any()):
        return
    at = int((wrong.flatten(1).any(1) if wrong.ndim > 1 else wrong).nonzero()[0])
    sequence, place = int(packed.sequence_of[at]), int(packed.positions[at])
    raise ProtocolError(
        f"{name} of token {place} (id {int(packed.tokens[at])}) of sequence {sequence} is {tensor[at].tolist()}.",
        part=_PART,
        hint=hint,
    )


def _kinds(sequence: TokenSequence) -> dict[str, Any]:
    """Return the dtype and shape of an entry of each tensor and value of a sequence, by name."""
    tensors = {"targets": sequence.targets, **sequence.per_token}
    kinds: dict[str, Any] = {name: (tensor.dtype, tuple(tensor.shape[1:])) for name, tensor in tensors.items()}
    return {**kinds, **dict.fromkeys(sequence.per_sequence, float)}
