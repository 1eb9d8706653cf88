"""`Layout`: the form in which a transformers model computes micro-batches, which losses and heads see as they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ...data.packing import PrefixGroup, shared_prefixes
from ...data.sequences import MicroBatch
from ..attention import Bounds, Segments
from ..head import PassQuery
from ..rank_collectives import ContextRanks
from .heads import HeadQuery
from .packed_attention import SEGMENTS


@dataclass(frozen=True, slots=True)
class Layout:
    """The tokens that a model computes for a micro-batch of N tokens, joined from one or more parts."""

    micro: MicroBatch
    """The micro-batch."""
    places: torch.Tensor
    """int64 [N]: where each of its tokens is in the flattened rows of tokens that the model computes; not all need to differ. -1
    where another rank computes it."""
    inputs: Mapping[str, Any]
    """Arguments of the model."""
    counts: tuple[int, ...]
    """How many tokens the model computes for each part, without padding, on all ranks that share them."""
    runs: tuple[int, ...]
    """How many consecutive tokens this rank computes for each part."""
    context: ContextRanks | None = None
    """The ranks that share the tokens, if any do."""

    def asked(self, query: PassQuery) -> HeadQuery:
        """Return the request for outputs of the micro-batch."""
        return HeadQuery(query, self.micro, self.places, self.context)

    @classmethod
    def padded(cls, micro: MicroBatch) -> Layout:
        """Place each sequence in a row of its own, padded on the right.

        There is no mask: attention is causal, and no token sees this padding.
        """
        tokens, places = micro.padded()
        counts = (len(micro.tokens),)
        return cls(micro, places, {"input_ids": tokens}, counts, counts)

    @classmethod
    def packed(cls, parts: Sequence[MicroBatch], *, share: bool = False, multiple: int = 1) -> Layout:
        """Place all sequences in one row, with padding at its end where its tokens are no `multiple`.

        With `share`, tokens that sequences of one part begin with are there once, and each of these sequences goes on from there:
        positions continue, and attention sees the prefix. The model is causal, so a prefix has the hidden states that it has in
        each sequence, and its gradient is the sum of theirs. Tokens with different `ROUTED_EXPERTS` are not shared.
        """
        groups = [shared_prefixes(part.prefix_keys) for part in parts] if share else []
        micro = MicroBatch.joined(parts)
        if any(group.shared for of_part in groups for group in of_part):
            return cls._shared(micro, groups, multiple)
        places = torch.arange(len(micro.tokens), device=micro.tokens.device)
        inputs = _row(micro.tokens, micro.positions, list(pairwise(micro.offsets.tolist())), [], multiple)
        counts = tuple(len(part.tokens) for part in parts)
        return cls(micro, places, inputs, counts, counts)

    @classmethod
    def _shared(cls, micro: MicroBatch, groups: Sequence[Sequence[PrefixGroup]], multiple: int) -> Layout:
        """Place the prefix of each group, once, before what follows it in each of the group's sequences."""
        offsets, first, stop = micro.offsets.tolist(), 0, 0
        bounds: list[Bounds] = []
        prefixes: list[Bounds] = []
        places, sources, counts = torch.empty(offsets[-1], dtype=torch.int64), [], []

        def add(start: int, end: int, prefix: Bounds) -> Bounds:
            """Append the tokens `start` to `end` of the micro-batch as a segment."""
            nonlocal stop
            added = stop, stop + end - start
            if end > start:
                places[start:end] = torch.arange(*added)
                sources.append(torch.arange(start, end))
                bounds.append(added)
                prefixes.append(prefix)
            stop = added[1]
            return added

        for of_part in groups:
            before = stop
            for group in of_part:
                begins = [offsets[first + member] for member in group.members]
                prefix = add(begins[0], begins[0] + group.shared, (0, 0)) if group.shared else (0, 0)
                for member, begin in zip(group.members, begins, strict=True):
                    places[begin : begin + group.shared] = torch.arange(*prefix)
                    add(begin + group.shared, offsets[first + member + 1], prefix)
            counts.append(stop - before)
            first += sum(len(group.members) for group in of_part)
        device = micro.tokens.device
        source = torch.cat(sources).to(device)
        inputs = _row(micro.tokens[source], micro.positions[source], bounds, prefixes, multiple)
        return cls(micro, places.to(device), inputs, tuple(counts), tuple(counts))


def _row(
    tokens: torch.Tensor, positions: torch.Tensor, bounds: list[Bounds], prefixes: list[Bounds], multiple: int
) -> dict[str, Any]:
    """Return a row of tokens, int64 [1, tokens], as arguments of a model. Padding is a segment of its own."""
    count = len(tokens)
    if added := -count % multiple:
        tokens, positions = (torch.nn.functional.pad(each, (0, added)) for each in (tokens, positions))
        bounds, prefixes = [*bounds, (count, count + added)], [*prefixes, (0, 0)] if prefixes else []
    segments = Segments(bounds, prefixes, tokens.device)
    return {"input_ids": tokens[None], "position_ids": positions[None], SEGMENTS: segments}
