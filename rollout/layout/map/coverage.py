"""Counts: is every element of a parameter written exactly once, and is every element of the checkpoint used by some rank?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .geometry import Block, Cover, elements_of, source_block, target_block
from .layout_map import LayoutMap


@dataclass(frozen=True, slots=True)
class TargetCoverage:
    """Elements of one parameter by what happens to them."""

    copied: int
    constant: int
    """Filled, and not copied over."""
    unmapped: int
    doubled: int
    """Copied more than once."""


def target_coverage(layout: LayoutMap) -> dict[str, TargetCoverage]:
    """What happens to the elements of each target of `layout`."""
    blocks = defaultdict(list)
    fills = defaultdict(list)
    for piece in layout.slices:
        blocks[piece.target].append(target_block(piece))
    for constant in layout.constants:
        fills[constant.target].append((constant.offset, constant.strides, constant.shape))
    result = {}
    for name, spec in layout.targets.items():
        everything = (spec.offset, spec.strides, spec.shape)
        copies, filled = (Cover([everything, *blocks[name], *fills[name]]) for _ in range(2))
        for block in blocks[name]:
            copies.add(block)
        for block in fills[name]:
            filled.add(block)
        times, padding = copies.view(everything), filled.view(everything) > 0
        unit = copies.unit
        result[name] = TargetCoverage(
            copied=int((times > 0).sum()) * unit,
            constant=int((padding & (times == 0)).sum()) * unit,
            unmapped=int((~padding & (times == 0)).sum()) * unit,
            doubled=int((times > 1).sum()) * unit,
        )
    return result


def unused_elements(layouts: Sequence[LayoutMap]) -> dict[str, int]:
    """For each checkpoint tensor that some element of is used by no rank: how many. `layouts` are those of all ranks."""
    blocks: dict[str, set[Block]] = defaultdict(set)
    for layout in layouts:
        for piece in layout.slices:
            blocks[piece.source].add(source_block(piece))
    # Layers are alike, and so are experts: most tensors are used like one before.
    known: dict[tuple[tuple[int, ...], frozenset[Block]], int] = {}
    result = {}
    for name, spec in layouts[0].sources.items():
        key = spec.shape, frozenset(blocks.get(name, ()))
        if (unused := known.get(key)) is None:
            unused = known[key] = _unused(*key) if spec.numel else 0
        if unused:
            result[name] = unused
    return result


def _unused(shape: tuple[int, ...], blocks: frozenset[Block]) -> int:
    """How many elements of a tensor of `shape` are in none of `blocks`."""
    everything = elements_of(shape)
    cover = Cover([everything, *blocks])
    for block in blocks:
        cover.add(block)
    return int((cover.view(everything) == 0).sum()) * cover.unit
