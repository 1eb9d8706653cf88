"""Turns a rearrangement of single elements, which no view expresses, into a few strided copies."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..map.geometry import Dimensions

_SAMPLE = 1 << 20
"""Most steps that are counted to find the commonest one: counting all would take long for large tensors."""


def strided_runs(targets: torch.Tensor, sources: torch.Tensor, limit: int) -> list[tuple[int, int, Dimensions]] | None:
    """Cover pairs of positions with strided blocks.

    The commonest step becomes a dimension, then the commonest step between blocks of one shape, and so on until nothing repeats.

    Args:
        targets: Ascending positions, int64 of shape ``[n]``.
        sources: The source position of each target position, int64 of shape ``[n]``.
        limit: Most blocks.

    Returns:
        Source offset, target offset and dimensions of each block; None if there would be more than `limit` blocks.
    """
    pending: dict[tuple[tuple[int, int, int], ...], list[tuple[torch.Tensor, torch.Tensor]]] = {
        (): [(targets, sources)]
    }
    changed = True
    while changed:
        changed = False
        found: dict[tuple[tuple[int, int, int], ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for dimensions, parts in pending.items():
            target = torch.cat([part for part, _ in parts])
            source = torch.cat([part for _, part in parts])
            order = target.argsort()
            for dimension, *starts in _repeated_steps(target[order], source[order], _reach(dimensions)):
                grown = dimensions if dimension is None else (dimension, *dimensions)
                changed |= dimension is not None
                found.setdefault(grown, []).append((starts[0], starts[1]))
        pending = found
        if sum(len(target) for parts in pending.values() for target, _ in parts) > limit and not changed:
            return None
    return [
        (start, offset, list(dimensions))
        for dimensions, parts in pending.items()
        for target, source in parts
        for start, offset in zip(source.tolist(), target.tolist(), strict=True)
    ]


def _reach(dimensions: Sequence[tuple[int, int, int]]) -> int:
    """Distance from a block's first source element to its last."""
    return sum((length - 1) * step for length, step, _ in dimensions)


def _repeated_steps(
    target: torch.Tensor, source: torch.Tensor, reach: int
) -> list[tuple[tuple[int, int, int] | None, torch.Tensor, torch.Tensor]]:
    """One more dimension: length and steps of the runs of each length, and the positions at which these runs start.

    Steps are larger than `reach`: the source strides of a block are a mixed radix, and as_strided cannot step backwards.
    """
    if len(target) == 1:
        return [(None, target, source)]
    target_steps, source_steps = target.diff(), source.diff()
    forward = source_steps > reach
    pairs = torch.stack([target_steps, source_steps])[:, :_SAMPLE][:, forward[:_SAMPLE]]
    if pairs.shape[1] == 0:
        return [(None, target, source)]
    distinct, counts = pairs.unique(dim=1, return_counts=True)  # type: ignore[no-untyped-call]
    stride, step = distinct[:, counts.argmax()].tolist()
    same = (target_steps == stride) & (source_steps == step)
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (~same).nonzero().flatten() + 1])
    lengths = torch.cat([starts, torch.tensor([len(target)])]).diff()
    runs: list[tuple[tuple[int, int, int] | None, torch.Tensor, torch.Tensor]] = []
    for length in lengths.unique().tolist():  # type: ignore[no-untyped-call]
        at = starts[lengths == length]
        runs.append((None if length == 1 else (length, step, stride), target[at], source[at]))
    return runs
