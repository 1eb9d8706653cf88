"""`ForwardInput`: one sequence, with the outputs that a program wants of it; and inputs nested in lists."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, cast

import torch

from weightlane.ckpt_engines import ProtocolError

from ..data.batch import TokenBatch
from ..data.sequences import IGNORED, TEMPERATURE, TokenSequence

PART = "trainer rank"


class Unset(enum.Enum):
    """The type of `UNSET`."""

    UNSET = enum.auto()


UNSET: Final = Unset.UNSET
"""The slot of an input that names none: the slot that was pushed last, or else the default, computes it."""


@dataclass(frozen=True, eq=False, kw_only=True)
class ForwardInput:
    """One sequence of a forward pass.

    Raises `ProtocolError` if it has no token, if lengths disagree, if it names a LoRA and a checkpoint, or if `temperature` or
    `top_k` is out of range.
    """

    input_tokens: torch.Tensor | Sequence[int]
    """int64 [T], T at least 1. Any sequence of integers, or tensor, is converted to it, on the CPU."""
    target_tokens: torch.Tensor | Sequence[int] | None = None
    """int64 [T, ...]: the tokens whose log-probabilities after each position are wanted, any number of them; -100 for none."""
    top_k: int = 0
    """Number of most probable next tokens that are wanted, at every position."""
    entropy: bool = False
    """Whether the entropy of the next token is wanted, at every position."""
    logits: bool = False
    """Whether logits over the full vocabulary are wanted, at every position: float32, without temperature."""
    hidden_states: bool = False
    """Whether the head's input is wanted, at every position."""
    temperature: float | None = None
    """Logits are divided by it for log-probabilities, entropy and top-k; None for 1."""
    lora: str | Unset | None = UNSET
    """The LoRA that computes it; None for the model's own weights."""
    checkpoint: str | Unset | None = UNSET
    """The checkpoint that computes it; None for the model's own weights."""

    def __post_init__(self) -> None:
        set_ = object.__setattr__
        set_(self, "input_tokens", torch.as_tensor(self.input_tokens, dtype=torch.int64, device="cpu"))
        if self.target_tokens is not None:
            set_(self, "target_tokens", torch.as_tensor(self.target_tokens, dtype=torch.int64, device="cpu"))
        if self.lora is not UNSET and self.checkpoint is not UNSET:
            raise ProtocolError(
                "an input names a LoRA and a checkpoint.", part=PART, hint="Name the slot that computes it, only one."
            )
        if self.temperature is not None and self.temperature <= 0:
            raise ProtocolError(f"temperature is {self.temperature}.", part=PART, hint="Give a positive number.")
        if self.top_k < 0:
            raise ProtocolError(f"top_k is {self.top_k}.", part=PART, hint="Leave it out, or give a positive number.")
        _ = self.sequence  # which checks the shapes

    @property
    def tokens(self) -> torch.Tensor:
        """`input_tokens`."""
        return cast("torch.Tensor", self.input_tokens)

    @property
    def targets(self) -> torch.Tensor | None:
        """`target_tokens`."""
        return cast("torch.Tensor | None", self.target_tokens)

    @property
    def sequence(self) -> TokenSequence:
        """The tokens with targets [T, K], K of them 1 where there are none."""
        targets = self.targets
        flat = self.tokens.new_full((len(self.tokens), 1), IGNORED) if self.tokens.ndim else self.tokens
        if targets is not None and targets.ndim:
            flat = targets.reshape(len(targets), -1)
        return TokenSequence(
            self.tokens, flat, {}, {TEMPERATURE: 1.0 if self.temperature is None else self.temperature}
        )

    @property
    def labels(self) -> int:
        """Number of targets of each position."""
        return 0 if self.targets is None else self.targets[:1].numel()

    @property
    def has_gradient(self) -> bool:
        """Whether any wanted output is differentiable."""
        return self.targets is not None or self.entropy or self.logits or self.hidden_states


ForwardInputs = ForwardInput | Sequence["ForwardInputs"]
"""An input, or lists of inputs nested to any depth; outputs are nested in the same way."""


def flattened(inputs: ForwardInputs) -> Iterator[ForwardInput]:
    """Every input in `inputs`, in order."""
    if isinstance(inputs, ForwardInput):
        yield inputs
    elif isinstance(inputs, Sequence) and not isinstance(inputs, str):
        for each in inputs:
            yield from flattened(each)
    else:
        raise ProtocolError(
            f"a {type(inputs).__name__} is among the inputs.",
            part=PART,
            hint="Give ForwardInput objects, or lists of them.",
        )


def check_tokens(inputs: Sequence[ForwardInput], vocabulary: int) -> None:
    """Raise `ProtocolError`, which names the input, for a token, target or number of tokens that the model doesn't have."""
    if not inputs:
        return
    for index, each in enumerate(inputs):
        if each.top_k > vocabulary:
            raise ProtocolError(
                f"top_k of sequence {index} is {each.top_k}, and the vocabulary has {vocabulary} tokens.", part=PART
            )
    labels = max(1, *(each.labels for each in inputs))
    TokenBatch(tuple(widened(each.sequence, labels) for each in inputs)).check_vocabulary(vocabulary)


def widened(sequence: TokenSequence, labels: int) -> TokenSequence:
    """Return the sequence with `labels` targets at each position; the added ones are ignored."""
    missing = labels - sequence.targets.shape[1]
    targets = torch.nn.functional.pad(sequence.targets, (0, missing), value=IGNORED)
    return TokenSequence(sequence.tokens, targets, sequence.per_token, sequence.per_sequence)


def digest(inputs: Sequence[ForwardInput], slot_of: Callable[[ForwardInput], str]) -> str:
    """Return a digest of tokens, targets, slots and wanted outputs of `inputs`."""
    found = hashlib.sha256()
    for each in inputs:
        wanted = (each.top_k, each.entropy, each.logits, each.hidden_states, each.temperature, slot_of(each))
        found.update(repr((*wanted, len(each.tokens), None if each.targets is None else each.targets.shape)).encode())
        for tensor in (each.tokens, each.targets):
            if tensor is not None:
                found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def refuse_different(told: Sequence[tuple[int, str]]) -> None:
    """Raise `ProtocolError` where ranks of one data parallel share `told` different digests.

    Different inputs would give wrong gradients, or hang.
    """
    first: dict[int, str] = {}
    if any(first.setdefault(share, inputs) != inputs for share, inputs in told):
        raise ProtocolError(
            "ranks that compute together were given different inputs.",
            part=PART,
            hint="Seed what draws and orders the inputs alike on all ranks; dp_rank_forward takes those of one rank.",
        )
