"""Token sequences with named values, and packed micro-batches of them.

Everything is aligned with the tokens that a model reads: entry ``t`` of `TokenSequence.targets` is the token to predict after
reading token ``t``, and entry ``t`` of a named value belongs to that prediction. No other module shifts by a token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Self

import torch

from weightlane.ckpt_engines import ProtocolError

IGNORED = -100
"""The target of a position at which nothing is predicted; the same number as in torch and transformers."""

TEMPERATURE = "temperature"
"""The per-sequence value by which logits are divided, if a sequence has it."""

ROUTED_EXPERTS = "routed_experts"
"""The per-token value with the experts that a mixture of experts routed a token to: int16 [T, decoder layers, experts per token].
`NO_EXPERT` where the layer has no experts, or the model is to choose them itself. Other values belong to the prediction after a
token; this one belongs to the reading of the token itself."""
NO_EXPERT = -1

_PART = "training batch"


@dataclass(frozen=True, slots=True, eq=False)
class TokenSequence:
    """One sequence: the tokens that a model reads, those that it should predict, and named values.

    Raises `ProtocolError` when there is no token, or lengths disagree. `TokenBatch` checks the values.
    """

    tokens: torch.Tensor
    """int64 [T], T at least 1."""
    targets: torch.Tensor
    """int64 [T], or [T, K] for K labels of every position; `IGNORED` where nothing is predicted."""
    per_token: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Values of every position, [T] or [T, ...] each."""
    per_sequence: Mapping[str, float] = field(default_factory=dict)
    """Values of the sequence."""

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or not len(self.tokens):
            raise ProtocolError(
                f"tokens have shape {list(self.tokens.shape)}; a sequence has one dimension and at least one token.",
                part=_PART,
            )
        for name, tensor in {"targets": self.targets, **self.per_token}.items():
            if not tensor.ndim or len(tensor) != len(self.tokens):
                raise ProtocolError(
                    f"{name} has shape {list(tensor.shape)} beside {len(self.tokens)} tokens.",
                    part=_PART,
                    hint="Every per-token value has one entry for each token that the model reads.",
                )

    @classmethod
    def of_completion(
        cls,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        *,
        masked: int = 0,
        per_token: Mapping[str, float | Sequence[float]] | None = None,
        per_sequence: Mapping[str, float] | None = None,
    ) -> Self:
        """Make a sequence of a prompt and its completion, whose targets are the completion's tokens.

        Args:
            prompt_ids: At least one token.
            completion_ids: At least one token.
            masked: Number of leading completion tokens that are read, but are no targets.
            per_token: Values of the completion tokens: one for each of them, or one number for all.
            per_sequence: Values of the sequence.

        Raises:
            ProtocolError: One of them is empty, or has another length than its values.
        """
        return cls.of_turns(
            [(prompt_ids, completion_ids)], masked=masked, per_token=per_token, per_sequence=per_sequence
        )

    @classmethod
    def of_turns(
        cls,
        turns: Sequence[tuple[Sequence[int], Sequence[int]]],
        *,
        masked: int = 0,
        per_token: Mapping[str, float | Sequence[float]] | None = None,
        per_sequence: Mapping[str, float] | None = None,
    ) -> Self:
        """Make a sequence of turns: tokens that are only read, then a completion. The completions' tokens are the targets.

        Args:
            turns: At least one. The first reads at least one token, and every completion has at least one.
            masked: Number of leading completion tokens that are read, but are no targets.
            per_token: Values of the tokens of all completions, in their order: one for each of them, or one number for all.
            per_sequence: Values of the sequence.

        Raises:
            ProtocolError: A part that must not be empty is, or a value has another length than the completions.
        """
        if not turns or not turns[0][0] or not all(written for _, written in turns):
            raise ProtocolError(
                "a sequence needs at least one prompt token and one completion token.", part=_PART, hint="Leave it out."
            )
        ids: list[int] = []
        predicting: list[int] = []  # the position before each completion token
        for read, written in turns:
            ids += read
            predicting += range(len(ids) - 1, len(ids) + len(written) - 1)
            ids += written
        if not 0 <= masked < len(predicting):
            raise ProtocolError(
                f"{masked} of {len(predicting)} completion tokens are masked.",
                part=_PART,
                hint="Leave a sequence out of which no token counts.",
            )
        tokens, places = torch.tensor(ids), torch.tensor(predicting)
        values = {}
        for name, given in (per_token or {}).items():
            each = [given] * len(predicting) if isinstance(given, int | float) else list(given)
            if len(each) != len(predicting):
                raise ProtocolError(
                    f"{len(predicting)} completion tokens came with {len(each)} {name}.",
                    part=_PART,
                    hint="Give one value for each completion token, or one number for all.",
                )
            values[name] = torch.zeros(len(ids) - 1).index_copy(0, places, torch.tensor(each, dtype=torch.float32))
        targets = torch.full((len(ids) - 1,), IGNORED)
        targets[places[masked:]] = tokens[places[masked:] + 1]
        return cls(tokens[:-1], targets, values, dict(per_sequence or {}))

    @property
    def length(self) -> int:
        """Tokens that the model reads."""
        return len(self.tokens)

    @property
    def target_tokens(self) -> int:
        """Positions with a target."""
        return int(_has_target(self.targets).sum())


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """Sequences of one forward pass, one after the other and without padding: N tokens of S sequences.

    Losses get this form, whatever form the model computes in.
    """

    tokens: torch.Tensor
    """int64 [N]."""
    targets: torch.Tensor
    """int64 [N] or [N, K]; see `TokenSequence.targets`."""
    offsets: torch.Tensor
    """int64 [S + 1]: the start of each sequence, then N."""
    per_token: Mapping[str, torch.Tensor]
    """[N] or [N, ...] each."""
    per_sequence: Mapping[str, torch.Tensor]
    """float32 [S] each."""
    sequences_per_unit: int = 1
    """See `TokenBatch.sequences_per_unit`; S is a multiple of it."""

    @classmethod
    def of(cls, sequences: Sequence[TokenSequence], sequences_per_unit: int = 1) -> Self:
        """Pack `sequences`, at least one, in their order."""
        first = sequences[0]
        lengths = torch.tensor([0, *(sequence.length for sequence in sequences)])
        return cls(
            torch.cat([sequence.tokens for sequence in sequences]),
            torch.cat([sequence.targets for sequence in sequences]),
            lengths.cumsum(0),
            {name: torch.cat([sequence.per_token[name] for sequence in sequences]) for name in first.per_token},
            {
                name: torch.tensor([sequence.per_sequence[name] for sequence in sequences], dtype=torch.float32)
                for name in first.per_sequence
            },
            sequences_per_unit,
        )

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Pack all sequences of `parts`, one part after the other. Several parts lose their per-token values."""
        if len(parts) == 1:
            return parts[0]
        lengths = torch.cat([parts[0].offsets.new_zeros(1), *(part.lengths for part in parts)])
        return cls(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.targets for part in parts]),
            lengths.cumsum(0),
            {},
            {name: torch.cat([part.per_sequence[name] for part in parts]) for name in parts[0].per_sequence},
        )

    @classmethod
    def without_targets(cls, like: TokenSequence, sequences_per_unit: int = 1) -> Self:
        """Make `sequences_per_unit` sequences of one token without a target, with values of the names and shapes of `like`.

        A rank that has run out of sequences computes this to take part in every collective.
        """
        nothing = TokenSequence(
            torch.zeros(1, dtype=torch.int64),
            torch.full_like(like.targets[:1], IGNORED),
            {
                name: torch.full_like(tensor[:1], NO_EXPERT if name == ROUTED_EXPERTS else 0)
                for name, tensor in like.per_token.items()
            },
            dict.fromkeys(like.per_sequence, 1.0),
        )
        return cls.of([nothing] * sequences_per_unit, sequences_per_unit)

    def required(self, name: str) -> torch.Tensor:
        """Return the per-token value `name`, [N] or [N, ...]. Raises `ProtocolError` if the batch lacks it."""
        if name not in self.per_token:
            raise ProtocolError(
                f"the loss needs the per-token value {name}, and the batch has {', '.join(self.per_token) or 'none'}.",
                part=_PART,
                hint=f"Give every TokenSequence of the batch per_token={{{name!r}: ...}}.",
            )
        return self.per_token[name]

    @cached_property
    def mask(self) -> torch.Tensor:
        """Where there is a target: bool [N]."""
        return _has_target(self.targets)

    @cached_property
    def lengths(self) -> torch.Tensor:
        """int64 [S]: tokens of each sequence."""
        return self.offsets.diff()

    @cached_property
    def sequence_of(self) -> torch.Tensor:
        """int64 [N]: the sequence, 0 to S - 1, that each token belongs to."""
        order = torch.arange(len(self.lengths), device=self.tokens.device)
        return torch.repeat_interleave(order, self.lengths, output_size=len(self.tokens))

    @cached_property
    def positions(self) -> torch.Tensor:
        """int64 [N]: the position of each token in its sequence."""
        return torch.arange(len(self.tokens), device=self.tokens.device) - self.offsets[self.sequence_of]

    @property
    def temperatures(self) -> torch.Tensor | None:
        """float32 [N]: divisor of each position's logits; None if sequences have no `TEMPERATURE`."""
        given = self.per_sequence.get(TEMPERATURE)
        return None if given is None else given[self.sequence_of]

    @property
    def prefix_keys(self) -> Sequence[torch.Tensor]:
        """The sequences as `shared_prefixes` compares them: int64 [T] on the CPU, equal where tokens and `ROUTED_EXPERTS` are."""
        keys = self.tokens.cpu()
        if (experts := self.per_token.get(ROUTED_EXPERTS)) is not None:
            known: dict[tuple[int, bytes], int] = {}
            read = zip(keys.tolist(), (row.tobytes() for row in experts.cpu().numpy()), strict=True)
            keys = torch.tensor([known.setdefault(each, len(known)) for each in read])
        return self.split(keys)

    def placed_experts(self, places: torch.Tensor, count: int, *, layers: int, experts: int) -> torch.Tensor:
        """Return `ROUTED_EXPERTS` in the order in which a model computes the tokens: int64 [count, layers, experts per token].

        Args:
            places: int64 [N]: where each token is among the `count` that the model computes; -1 for tokens that it doesn't.
            count: Number of tokens that the model computes. For padding, it chooses experts itself.
            layers: Number of the model's decoder layers.
            experts: Number of experts in a layer.

        Raises:
            ProtocolError: The batch has no such value, or that of another model.
        """
        given, here = self.per_token.get(ROUTED_EXPERTS), places >= 0
        if given is None:
            raise ProtocolError(
                f"router replay needs the per-token value {ROUTED_EXPERTS}, and the batch has none.",
                part=_PART,
                hint="Give every TokenSequence the experts that the rollout returned, or set router_replay to false.",
            )
        if given.shape[1] != layers or bool(((given < NO_EXPERT) | (given >= experts)).any()):
            raise ProtocolError(
                f"the batch has experts {int(given.min())} to {int(given.max())} of {given.shape[1]} layers, and the model has"
                f" {experts} experts in {layers} layers.",
                part=_PART,
                hint="Train the model that the rollouts generate with.",
            )
        placed = torch.full((count, *given.shape[1:]), NO_EXPERT, device=given.device)
        placed[places[here]] = given[here].long()
        return placed

    def sum_by_sequence(self, values: torch.Tensor) -> torch.Tensor:
        """Sum `values` [N] over the tokens of each sequence: [S]."""
        return values.new_zeros(len(self.lengths)).index_add(0, self.sequence_of, values)

    def split(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Split `values` [N, ...] into one tensor per sequence."""
        return list(torch.split(values, self.lengths.tolist()))

    def to(self, device: torch.device) -> Self:
        """Return the same micro-batch with its tensors on `device`."""
        move: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor.to(device)  # noqa: E731
        return replace(
            self,
            tokens=move(self.tokens),
            targets=move(self.targets),
            offsets=move(self.offsets),
            per_token={name: move(tensor) for name, tensor in self.per_token.items()},
            per_sequence={name: move(tensor) for name, tensor in self.per_sequence.items()},
        )

    def padded(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens as right-padded rows, for models that compute in this form.

        Returns:
            int64 [S, T] tokens, with 0 as padding; and int64 [N], the index of each packed token in the flattened rows.
        """
        width = int(self.lengths.max())
        rows, places = len(self.lengths), self.sequence_of * width + self.positions
        tokens = self.tokens.new_zeros(rows * width).index_copy(0, places, self.tokens)
        return tokens.view(rows, width), places


def _has_target(targets: torch.Tensor) -> torch.Tensor:
    counts = targets != IGNORED
    return counts.flatten(1).any(1) if counts.ndim > 1 else counts
