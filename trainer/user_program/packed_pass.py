"""`PackedPass`: inputs of one or several slots in one forward pass, whose outputs are split by input afterwards."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from ..data.sequences import MicroBatch, TokenSequence
from ..engines.head import PassQuery
from .inputs import ForwardInput, widened
from .outputs import ForwardOutput, TopK
from .slots import BASE


class PassKind(enum.IntEnum):
    """The gradients that a pass makes. Ranks run passes of the same kind at the same time, in this order."""

    BASE = 0
    """Gradients of the model's own weights."""
    ADAPTERS = 1
    """Gradients of the adapters that compute it."""
    NONE = 2
    """No gradient."""


@dataclass(frozen=True, slots=True)
class PackedPass:
    """Inputs that one forward pass computes."""

    kind: PassKind
    parts: tuple[tuple[str, tuple[ForwardInput, ...]], ...]
    """Slots, each with its inputs: at least one, unless this rank only takes part in a pass of the other ranks."""
    head: bool = False
    """Whether the head is computed even if no input needs it, because its weight has a gradient on another rank."""

    @property
    def gradient(self) -> bool:
        """Whether a graph is kept."""
        return self.kind != PassKind.NONE

    @property
    def slots(self) -> tuple[str, ...]:
        """The slots that compute it."""
        return tuple(slot for slot, _ in self.parts)

    @property
    def inputs(self) -> list[ForwardInput]:
        """The inputs of all slots, in the order in which they are packed."""
        return list(chain.from_iterable(inputs for _, inputs in self.parts))

    @property
    def asks_head(self) -> bool:
        """Whether an output with gradient comes from the head."""
        return any(each.targets is not None or each.entropy or each.logits for each in self.inputs)

    def packed(self) -> list[tuple[str, MicroBatch]]:
        """The sequences of each slot, packed one after the other; a single token if there is no input."""
        token = torch.zeros(1, dtype=torch.int64)
        nothing = MicroBatch.without_targets(TokenSequence(token, token[:, None]))
        labels = max(1, *(each.labels for each in self.inputs), 1)
        return [
            (slot, MicroBatch.of([widened(each.sequence, labels) for each in inputs]) if inputs else nothing)
            for slot, inputs in self.parts
        ]

    def query(self, packed: Sequence[tuple[str, MicroBatch]]) -> PassQuery:
        """Return the union of the outputs that the inputs want, which are `packed`."""
        inputs = self.inputs
        if not inputs:  # needs a graph through every layer
            return PassQuery(torch.empty(0, dtype=torch.int64), logprobs=self.head, hidden=True)
        lengths = [len(each.tokens) for each in inputs]
        everywhere = [bool(each.top_k or each.entropy) for each in inputs]
        rows = torch.cat([micro.mask for _, micro in packed]) | _each_token(everywhere, lengths)
        logits = _each_token([each.logits for each in inputs], lengths)
        return PassQuery(
            rows.nonzero().squeeze(1),
            logprobs=self.head or any(each.targets is not None for each in inputs),
            entropy=any(each.entropy for each in inputs),
            top_k=max(each.top_k for each in inputs),
            hidden=any(each.hidden_states for each in inputs),
            logit_rows=logits.nonzero().squeeze(1) if any(logits) else None,
        )

    def split(self, found: dict[str, torch.Tensor], query: PassQuery) -> list[dict[str, torch.Tensor]]:
        """Split the outputs of the pass by input. Each has those that it wants."""
        lengths = [len(each.tokens) for each in self.inputs]
        parts = {}
        for name, tensor in found.items():
            rows = None if name == "hidden" else query.logit_rows if name == "logits" else query.rows
            parts[name] = torch.split(_scattered(tensor, rows, sum(lengths)), lengths)
        return [{name: parts[name][number] for name in _wanted(each)} for number, each in enumerate(self.inputs)]


def by_slot(
    inputs: Sequence[ForwardInput], slots: Sequence[str], trained: Sequence[str], *, joined: bool
) -> list[PackedPass]:
    """Group inputs by their `slots` into passes: if `joined`, one for each `PassKind`, else one for each slot and kind.

    Only slots in `trained`, which is empty while torch's grad mode is off, can have a gradient.
    """
    groups: dict[tuple[PassKind, str], dict[str, list[ForwardInput]]] = {}
    for slot, each in zip(slots, inputs, strict=True):
        kind = PassKind.NONE
        if slot in trained and each.has_gradient:
            kind = PassKind.BASE if slot == BASE else PassKind.ADAPTERS
        groups.setdefault((kind, "" if joined else slot), {}).setdefault(slot, []).append(each)
    passes = [
        PackedPass(kind, tuple((slot, tuple(group)) for slot, group in parts.items()))
        for (kind, _), parts in groups.items()
    ]
    return sorted(passes, key=lambda each: each.kind)


def demand(passes: Sequence[PackedPass], *, by_slot: bool) -> dict[str, int]:
    """Count `passes` by kind, or by kind and slot; and say whether one of the model's own weights asks the head.

    `most_of` the demands of all ranks are the passes that every rank runs, see `filled_up`.
    """
    counts = Counter(_pass_key(each, by_slot=by_slot) for each in passes)
    asks_head = any(each.asks_head for each in passes if each.kind == PassKind.BASE)
    return {**counts, **({_HEAD: 1} if asks_head else {})}


def most_of(demands: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Return the largest of each number in the demands of the ranks."""
    most = Counter[str]()
    for each in demands:
        most |= Counter(each)
    return dict(most)


def filled_up(
    passes: Sequence[PackedPass], most: Mapping[str, int], adapter: str, *, by_slot: bool
) -> list[PackedPass]:
    """Add empty passes up to the `demand` of all ranks. `adapter` names a slot that passes of adapters can have."""
    found = []
    for key in sorted(most.keys() - {_HEAD}):
        mine = [each.parts for each in passes if _pass_key(each, by_slot=by_slot) == key]
        number, _, slot = key.partition("|")
        kind = PassKind(int(number))
        slot = slot or (adapter if kind == PassKind.ADAPTERS else BASE)
        mine += [((slot, ()),)] * (most[key] - len(mine))
        found += [PackedPass(kind, parts, head=_HEAD in most and kind == PassKind.BASE) for parts in mine]
    return found


_HEAD = "head"


def _pass_key(each: PackedPass, *, by_slot: bool) -> str:
    """The kind of a pass, and with `by_slot` its only slot: equal for passes that ranks can run together."""
    return f"{each.kind:d}|{each.slots[0] if by_slot else ''}"


def output_of(each: ForwardInput, found: dict[str, torch.Tensor]) -> ForwardOutput:
    """Return the output for an input from what `PackedPass.split` returned for it."""
    targets = each.targets
    return ForwardOutput(
        None if targets is None else found["logprobs"][:, : each.labels].reshape(targets.shape),
        TopK(found["top_tokens"][:, : each.top_k], found["top_logprobs"][:, : each.top_k]) if each.top_k else None,
        found.get("entropy"),
        found.get("logits"),
        found.get("hidden"),
    )


def _wanted(each: ForwardInput) -> list[str]:
    asked = {
        "logprobs": each.targets is not None,
        "entropy": each.entropy,
        "logits": each.logits,
        "hidden": each.hidden_states,
        "top_tokens": each.top_k > 0,
        "top_logprobs": each.top_k > 0,
    }
    return [name for name, wanted in asked.items() if wanted]


def _each_token(flags: Sequence[bool], lengths: Sequence[int]) -> torch.Tensor:
    return torch.repeat_interleave(torch.tensor(flags), torch.tensor(lengths))


def _scattered(values: torch.Tensor, rows: torch.Tensor | None, tokens: int) -> torch.Tensor:
    """Scatter `values`, which belong to `rows`, over all tokens, with zeros elsewhere."""
    if rows is None or len(rows) == tokens:
        return values
    return values.new_zeros((tokens, *values.shape[1:])).index_copy(0, rows.to(values.device), values)
