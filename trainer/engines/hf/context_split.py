"""Context parallelism: each of several ranks computes a part of a packed row's tokens, and attends to all of them.

Every rank gathers the keys and values of the whole row in every attention layer. Nothing else in a model that packs sequences
sees more than one token, so the rest of the model runs as it is on the rank's own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, pairwise

import torch

from weightlane.ckpt_engines import ConfigError

from ...config import TrainerConfig
from ...data.packing import balanced_blocks
from ..attention import Bounds, GatheredKeys, Segments
from ..rank_collectives import ContextRanks
from .layout import Layout
from .packed_attention import SEGMENTS, can_pack


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
    tokens, positions = layout.inputs["input_ids"], layout.inputs["position_ids"]
    blocks = balanced_blocks(layout.inputs[SEGMENTS].costs(), ranks.count)
    stop = max(bounds[-1][1] for bounds in blocks)
    blocks = [[*bounds, (stop + index, stop + index + 1)] for index, bounds in enumerate(blocks)]
    added = stop + ranks.count - tokens.numel()
    padded = {
        **layout.inputs,
        "input_ids": torch.nn.functional.pad(tokens, (0, added)),
        "position_ids": torch.cat([positions, positions.max().expand(1, added)], 1),
    }
    return part_of(replace(layout, inputs=padded), blocks, ranks)


def part_of(layout: Layout, blocks: Sequence[Sequence[Bounds]], ranks: ContextRanks) -> Layout:
    """Return the tokens of a row that this rank computes.

    `blocks` has runs of tokens for every rank: as many tokens on each, and all of the row together.
    """
    tokens = layout.inputs["input_ids"][0]
    held = torch.stack([torch.cat([torch.arange(*block) for block in bounds]) for bounds in blocks]).to(tokens.device)
    keys, own, mine = GatheredKeys(held.flatten().argsort(), ranks.group), held[ranks.index], blocks[ranks.index]
    here = (keys.order - ranks.index * len(own))[layout.places]
    segments: Segments = layout.inputs[SEGMENTS]
    inputs = {
        **layout.inputs,
        "input_ids": tokens[own][None],
        "position_ids": layout.inputs["position_ids"][0][own][None],
        SEGMENTS: segments.part(mine, keys),
    }
    parts = pairwise([0, *list(accumulate(layout.counts))[:-1], len(tokens)])
    runs = tuple(_common(mine, each) for each in parts)
    places = torch.where((here >= 0) & (here < len(own)), here, -1)
    return replace(layout, places=places, inputs=inputs, runs=runs, context=ranks)


def _common(blocks: Sequence[Bounds], part: Bounds) -> int:
    """Return how many tokens of `part` are in `blocks`."""
    return sum(max(0, min(stop, part[1]) - max(start, part[0])) for start, stop in blocks)
