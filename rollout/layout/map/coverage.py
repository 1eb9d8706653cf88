"""Coverage of a layout: is every parameter element written exactly once, and is every checkpoint element used by some rank?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .geometry import Block, Cover, blocks_read, elements_of, target_block
from .layout_map import LayoutMap, SourceSpec


@dataclass(frozen=True, slots=True)
class TargetCoverage:
    """Numbers of elements of one parameter."""

    constant: int
    """Filled with a constant, and not copied over."""
    unmapped: int
    """Neither filled nor copied."""
    doubled: int
    """Copied more than once."""


def target_coverage(layout: LayoutMap) -> dict[str, TargetCoverage]:
    """The coverage of each target of `layout`."""
    blocks = defaultdict(list)
    fills = defaultdict(list)
    for copy in layout.copies:
        blocks[copy.target].append(target_block(copy))
    for constant in layout.constants:
        fills[constant.target].append((constant.offset, constant.strides, constant.shape))
    result = {}
    for name, spec in layout.targets.items():
        everything = (spec.offset, spec.strides, spec.shape)
        copied, filled = (Cover([everything, *blocks[name], *fills[name]]) for _ in range(2))
        for block in blocks[name]:
            copied.add(block)
        for block in fills[name]:
            filled.add(block)
        times, padding = copied.view(everything), filled.view(everything) > 0
        result[name] = TargetCoverage(
            constant=int((padding & (times == 0)).sum()) * copied.unit,
            unmapped=int((~padding & (times == 0)).sum()) * copied.unit,
            doubled=int((times > 1).sum()) * copied.unit,
        )
    return result


@dataclass(frozen=True, slots=True)
class Reads:
    """The part of a checkpoint that one rank's loading uses."""

    blocks: Mapping[str, Collection[Block]]
    """The blocks of each tensor that are copied."""
    uncopied: frozenset[str]
    """Tensors of which any element may be used: `LayoutMap.uncopied_sources`."""

    @classmethod
    def of(cls, layout: LayoutMap) -> Reads:
        """The part that a rank with this layout uses."""
        return cls(blocks_read(layout.copies), frozenset(layout.uncopied_sources))

    def to_plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {"blocks": {name: list(each) for name, each in self.blocks.items()}, "uncopied": sorted(self.uncopied)}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Reads:
        """The inverse of `to_plain`."""
        blocks = {
            name: [(offset, tuple(strides), tuple(shape)) for offset, strides, shape in each]
            for name, each in plain["blocks"].items()
        }
        return cls(blocks, frozenset(plain["uncopied"]))


def unused_elements(sources: Mapping[str, SourceSpec], ranks: Sequence[Reads]) -> dict[str, int]:
    """The number of elements that none of `ranks`, which are all of a replica's, uses, for each tensor with such elements."""
    excused = frozenset[str]().union(*(rank.uncopied for rank in ranks))
    # Layers are alike, and so are experts: most tensors are used like one before.
    known: dict[tuple[tuple[int, ...], frozenset[Block]], int] = {}
    result = {}
    for name, spec in sources.items():
        if name in excused:
            continue
        key = spec.shape, frozenset(block for rank in ranks for block in rank.blocks.get(name, ()))
        if (unused := known.get(key)) is None:
            unused = known[key] = _unused(*key) if spec.numel else 0
        if unused:
            result[name] = unused
    return result


def _unused(shape: tuple[int, ...], blocks: frozenset[Block]) -> int:
    """The number of elements of a tensor of `shape` that are in none of `blocks`."""
    everything = elements_of(shape)
    cover = Cover([everything, *blocks])
    for block in blocks:
        cover.add(block)
    return int((cover.view(everything) == 0).sum()) * cover.unit
