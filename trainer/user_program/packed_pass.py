"""`PackedPass`: inputs of one slot in one forward pass, whose outputs are split by input afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..data.sequences import MicroBatch, TokenSequence
from ..engines.head import PassQuery
from .inputs import ForwardInput, widened
from .outputs import ForwardOutput, TopK


@dataclass(frozen=True, slots=True)
class PackedPass:
    """Inputs that one slot computes in one forward pass."""

    slot: str
    inputs: tuple[ForwardInput, ...]
    """At least one, unless this rank only takes part in a pass of the other ranks."""
    gradient: bool
    """Whether a graph is kept for the slot's gradients."""

    @property
    def tokens(self) -> int:
        """Tokens of all inputs."""
        return sum(len(each.tokens) for each in self.inputs)

    def packed(self) -> MicroBatch:
        """The sequences, packed one after the other; a single token if there is no input."""
        if not self.inputs:
            token = torch.zeros(1, dtype=torch.int64)
            return MicroBatch.without_targets(TokenSequence(token, token[:, None]))
        labels = max(1, *(each.labels for each in self.inputs))
        return MicroBatch.of([widened(each.sequence, labels) for each in self.inputs])

    def query(self, micro: MicroBatch) -> PassQuery:
        """The union of the outputs that the inputs want."""
        if not self.inputs:  # needs a graph through every layer
            return PassQuery(torch.empty(0, dtype=torch.int64), logprobs=False, hidden=True)
        lengths = [len(each.tokens) for each in self.inputs]
        everywhere = [bool(each.top_k or each.entropy) for each in self.inputs]
        rows = micro.mask | _each_token(everywhere, lengths)
        logits = _each_token([each.logits for each in self.inputs], lengths)
        return PassQuery(
            rows.nonzero().squeeze(1),
            logprobs=any(each.targets is not None for each in self.inputs),
            entropy=any(each.entropy for each in self.inputs),
            top_k=max(each.top_k for each in self.inputs),
            hidden=any(each.hidden_states for each in self.inputs),
            logit_rows=logits.nonzero().squeeze(1) if any(logits) else None,
        )

    def split(self, found: dict[str, torch.Tensor], query: PassQuery) -> list[ForwardOutput]:
        """Split the outputs of the pass by input."""
        whole = {
            name: _scattered(tensor, query.logit_rows if name == "logits" else query.rows, self.tokens)
            if name != "hidden"
            else tensor
            for name, tensor in found.items()
        }
        lengths = [len(each.tokens) for each in self.inputs]
        parts = {name: torch.split(tensor, lengths) for name, tensor in whole.items()}
        return [
            _output(each, {name: tensors[number] for name, tensors in parts.items()})
            for number, each in enumerate(self.inputs)
        ]


def by_slot(inputs: Sequence[ForwardInput], slots: Sequence[str], trained: Sequence[str]) -> list[PackedPass]:
    """Group inputs by their `slots` into one pass for each.

    Those that need a gradient are in passes of their own, which come first. Only slots in `trained`, which is empty while torch's
    grad mode is off, can have one.
    """
    groups: dict[tuple[str, bool], list[ForwardInput]] = {}
    for slot, each in zip(slots, inputs, strict=True):
        groups.setdefault((slot, slot in trained and each.has_gradient), []).append(each)
    passes = [PackedPass(slot, tuple(group), gradient) for (slot, gradient), group in groups.items()]
    return sorted(passes, key=lambda each: not each.gradient)


def _each_token(flags: Sequence[bool], lengths: Sequence[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.tensor(flags), torch.tensor(lengths))


def _scattered(values: torch.Tensor, rows: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """Scatter `values`, which belong to `rows`, over all tokens, with zeros elsewhere."""
    if rows is None or len(rows) == tokens:
        return values
    return values.new_zeros((tokens, *values.shape[1:])).index_copy(0, rows.to(values.device), values)


def _output(each: ForwardInput, found: dict[str, torch.Tensor]) -> ForwardOutput:
    targets = each.targets
    return ForwardOutput(
        None if targets is None else found["logprobs"][:, : each.labels].reshape(targets.shape),
        TopK(found["top_tokens"][:, : each.top_k], found["top_logprobs"][:, : each.top_k]) if each.top_k else None,
        found["entropy"] if each.entropy else None,
        found["logits"] if each.logits else None,
        found["hidden"] if each.hidden_states else None,
    )
