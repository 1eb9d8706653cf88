"""Coverage of a layout: is every parameter element written exactly once, and is every checkpoint element used by some rank?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from .geometry import Block, Cover, elements_of, source_block, target_block
from .layout_map import LayoutMap


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


def unused_elements(layouts: Sequence[LayoutMap]) -> dict[str, int]:
    """The number of elements that no rank uses, for each checkpoint tensor with such elements. `layouts` are those of all ranks.

    Tensors that are uncopied on any rank (`LayoutMap.uncopied_sources`) are left out: their elements may be used.
    """
    excused = set[str]().union(*(layout.uncopied_sources for layout in layouts))
    blocks: dict[str, set[Block]] = defaultdict(set)
    for layout in layouts:
        for copy in layout.copies:
            blocks[copy.source].add(source_block(copy))
    # Layers are alike, and so are experts: most tensors are used like one before.
    known: dict[tuple[tuple[int, ...], frozenset[Block]], int] = {}
    result = {}
    for name, spec in layouts[0].sources.items():
        if name in excused:
            continue
        key = spec.shape, frozenset(blocks.get(name, ()))
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
