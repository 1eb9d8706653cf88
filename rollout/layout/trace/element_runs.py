"""From single elements to blocks: how a rearrangement that views cannot express becomes a few strided copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..map.geometry import Dimensions

_SAMPLE = 1 << 20


def strided_runs(targets: torch.Tensor, sources: torch.Tensor, limit: int) -> list[tuple[int, int, Dimensions]] | None:
    """Cover pairs of positions with strided blocks.

    The commonest step is made a dimension, then the commonest step between blocks of one shape, and so on until nothing repeats.

    Args:
        targets: Ascending positions, int64 of shape ``[n]``.
        sources: The position that goes to each, int64 of shape ``[n]``.
        limit: Most blocks worth having.

    Returns:
        Source offset, target offset and dimensions of each block; None when `limit` does not do.
    """
    pending: dict[tuple[tuple[int, int, int], ...], list[tuple[torch.Tensor, torch.Tensor]]] = {
        (): [(targets, sources)]
    }
    changed = True
    while changed:
        changed = False
        found: dict[tuple[tuple[int, int, int], ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for dimensions, parts in pending.items():
            to = torch.cat([part for part, _ in parts])
            come = torch.cat([part for _, part in parts])
            order = to.argsort()
            for dimension, starts_to, starts_come in _level(to[order], come[order], _reach(dimensions)):
                grown = dimensions if dimension is None else (dimension, *dimensions)
                changed |= dimension is not None
                found.setdefault(grown, []).append((starts_to, starts_come))
        pending = found
        if sum(len(to) for parts in pending.values() for to, _ in parts) > limit and not changed:
            return None
    return [
        (start, offset, list(dimensions))
        for dimensions, parts in pending.items()
        for to, come in parts
        for start, offset in zip(come.tolist(), to.tolist(), strict=True)
    ]


def _reach(dimensions: Sequence[tuple[int, int, int]]) -> int:
    """How far from its start a block reads."""
    return sum((length - 1) * step for length, step, _ in dimensions)


def _level(
    to: torch.Tensor, come: torch.Tensor, reach: int
) -> list[tuple[tuple[int, int, int] | None, torch.Tensor, torch.Tensor]]:
    """One more dimension: length and steps of each run, and where runs of that length start.

    Steps are larger than `reach`: the source strides of a block are a mixed radix, and as_strided cannot walk backwards.
    """
    if len(to) == 1:
        return [(None, to, come)]
    step_to, step_come = to.diff(), come.diff()
    forward = step_come > reach
    pairs = torch.stack([step_to, step_come])[:, :_SAMPLE][:, forward[:_SAMPLE]]
    if pairs.shape[1] == 0:
        return [(None, to, come)]
    distinct, counts = pairs.unique(dim=1, return_counts=True)  # type: ignore[no-untyped-call]
    stride, step = distinct[:, counts.argmax()].tolist()
    same = (step_to == stride) & (step_come == step)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (~same).nonzero().flatten() + 1])
    lengths = torch.cat([starts, torch.tensor([len(to)])]).diff()
    levels: list[tuple[tuple[int, int, int] | None, torch.Tensor, torch.Tensor]] = []
    for length in lengths.unique().tolist():  # type: ignore[no-untyped-call]
        at = starts[lengths == length]
        levels.append((None if length == 1 else (length, step, stride), to[at], come[at]))
    return levels
