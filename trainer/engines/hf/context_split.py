"""Context parallelism: each of several ranks computes a part of a packed row's tokens, and attends to all of them.

Every rank gathers the keys and values of the whole row in every attention layer. Nothing else in a model that packs sequences
sees more than one token, so the rest of the model runs as it is on the rank's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from weightlane.ckpt_engines import ConfigError

from ...config import TrainerConfig
from ...data.packing import balanced_blocks
from ..attention import Bounds, GatheredKeys, Segments
from ..rank_collectives import ContextRanks
from .layout import Layout
from .packed_attention import SEGMENTS, can_pack


@dataclass(frozen=True, slots=True)
class RowPart:
    """The tokens of a row that one of several ranks computes."""

    own: torch.Tensor
    """int64 [tokens]: which of the row's tokens they are, one after the other."""
    segments: Segments
    """The segments of these tokens, which say what each of them sees."""
    _here: torch.Tensor
    """int64 [all tokens of the row]: where each is among them, outside of their number if it isn't."""

    @classmethod
    def of(
        cls, segments: Segments, blocks: Sequence[Sequence[Bounds]], ranks: ContextRanks, device: torch.device
    ) -> RowPart:
        """Take this rank's of the `blocks`, which are as many tokens on every rank, and all tokens of the row together."""
        held = torch.stack([torch.cat([torch.arange(*block) for block in bounds]) for bounds in blocks]).to(device)
        keys, own = GatheredKeys(held.flatten().argsort(), ranks.group), held[ranks.index]
        return cls(own, segments.part(blocks[ranks.index], keys), keys.order - ranks.index * len(own))

    def places(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return where `tokens` of the row, int64, are among those of this rank; -1 for those that other ranks compute."""
        here = self._here[tokens]
        return torch.where((here >= 0) & (here < len(self.own)), here, -1)


def check_context(config: TrainerConfig, skeleton: torch.nn.Module) -> None:
    """Raise `ConfigError` if the tokens of `skeleton`, a model on the meta device, cannot be shared as `config` asks for."""
    if config.fsdp2.context_parallel == 1 or (config.fsdp2.packing == "auto" and can_pack(skeleton)):
        return
    why = f"layers of {type(skeleton).__name__} see other tokens otherwise than by attention that can be exchanged"
    raise ConfigError(
        f"trainer.fsdp2.context_parallel is {config.fsdp2.context_parallel}, which needs packed sequences, and"
        f" {why if config.fsdp2.packing == 'auto' else 'trainer.fsdp2.packing is off'}.",
        part="fsdp2 engine",
        hint="Set trainer.fsdp2.context_parallel to 1"
        + (", or train another architecture." if config.fsdp2.packing == "auto" else ", or packing to auto."),
    )


def split_layout(layout: Layout, ranks: ContextRanks) -> Layout:
    """Return the part of a packed `layout` that this rank computes; all ranks compute the same number of tokens.

    The last token of every rank is padding at the row's last position: rotary frequencies that depend on the longest sequence are
    then the same on every rank.
    """
    segments: Segments = layout.inputs[SEGMENTS]
    tokens, positions = layout.inputs["input_ids"][0], layout.inputs["position_ids"][0]
    blocks = balanced_blocks(segments.costs(), ranks.count)
    stop = max(bounds[-1][1] for bounds in blocks)
    blocks = [[*bounds, (stop + index, stop + index + 1)] for index, bounds in enumerate(blocks)]
    part = RowPart.of(segments, blocks, ranks, tokens.device)
    added = stop + ranks.count - len(tokens)
    parts = pairwise([0, *list(accumulate(layout.counts))[:-1], stop + ranks.count])
    inputs = {
        **layout.inputs,
        "input_ids": torch.nn.functional.pad(tokens, (0, added))[part.own][None],
        "position_ids": torch.cat([positions, positions.max().expand(added)])[part.own][None],
        SEGMENTS: part.segments,
    }
    runs = tuple(_common(blocks[ranks.index], each) for each in parts)
    return replace(layout, places=part.places(layout.places), inputs=inputs, runs=runs, context=ranks)


def _common(blocks: Sequence[Bounds], part: Bounds) -> int:
    """Return how many tokens of `part` are in `blocks`."""
    return sum(max(0, min(stop, part[1]) - max(start, part[0])) for start, stop in blocks)
