"""Slices of tensors: how trainer ranks and rollout ranks cut them, and the values that they have in each version."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from weightlane.sync import Placement, TensorSpec
from weightlane.sync.version.box import Box

SHAPES = {"embed": (37, 192), "q": (24, 192), "o": (24, 320), "experts": (6, 8, 130), "norm": (192,), "scale": ()}
SPECS = {name: TensorSpec(name, shape, torch.float32) for name, shape in SHAPES.items()}
Specs = Mapping[str, TensorSpec]
Cut = Callable[[TensorSpec, int, int], list[Box]]


def along(axis: int) -> Cut:
    """Even parts along a dimension, the last ones short or empty; of a scalar, everything on rank 0."""

    def cut(spec: TensorSpec, rank: int, world: int) -> list[Box]:
        if not spec.shape:
            return [Box((), ())] if rank == 0 else []
        at = min(axis, len(spec.shape) - 1)
        chunk = -(-spec.shape[at] // world)
        first, stop = (min(spec.shape[at], number * chunk) for number in (rank, rank + 1))
        whole = Box.whole(spec.shape)
        return [
            Box(
                (*whole.starts[:at], first, *whole.starts[at + 1 :]),
                (*whole.shape[:at], stop - first, *whole.shape[at + 1 :]),
            )
        ]

    return cut


rows, columns = along(0), along(9)


def copies(spec: TensorSpec, rank: int, world: int) -> list[Box]:
    """Everything on every rank, as data-parallel ranks hold it."""
    return [Box.whole(spec.shape)]


def interleaved(spec: TensorSpec, rank: int, world: int) -> list[Box]:
    """Every so manieth row, as fused parameters of tensor-parallel ranks hold them."""
    if not spec.shape:
        return copies(spec, rank, world)
    return [Box((row, *(0 for _ in spec.shape[1:])), (1, *spec.shape[1:])) for row in range(rank, spec.shape[0], world)]


def pieces(spec: TensorSpec, rank: int, world: int) -> list[Box]:
    """Neighbouring rows, in pieces of five, as a rank holds groups of a fused parameter."""
    if not spec.shape:
        return copies(spec, rank, world) if rank == 0 else []
    (own,) = rows(spec, rank, world)
    (first, *others), (count, *sizes) = own.starts, own.shape
    return [Box((first + at, *others), (min(5, count - at), *sizes)) for at in range(0, count, 5)]


def mesh(spec: TensorSpec, rank: int, world: int) -> list[Box]:
    """Rows of columns: two ranks in each direction."""
    if len(spec.shape) < 2:
        return rows(spec, rank // 2, 2)
    row, column = rows(spec, rank // 2, 2)[0], columns(spec, rank % 2, 2)[0]
    common = row.intersect(column)
    return [common] if common is not None else []


def values(version: int, specs: Specs = SPECS) -> dict[str, torch.Tensor]:
    """The tensors of a version: one element in 96 is new in each."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(spec.shape, generator=generator) for name, spec in specs.items()}
    for tensor in tensors.values():
        tensor.view(-1)[version % 96 :: 96] += version
    return tensors


def of_rank(cut: Cut, rank: int, world: int, specs: Specs = SPECS) -> Placement:
    """Return the placement that a tensor-parallel rank needs: its cut of each tensor, and every scalar whole."""
    return Placement.of_boxes(
        (spec, cut(spec, rank, world) if spec.shape else [Box((), ())]) for spec in specs.values()
    )


TP2 = [of_rank(columns, 0, 2), of_rank(columns, 1, 2)]
EVERYTHING = None
LAYOUTS: dict[str, tuple[Cut, int]] = {
    "rows": (rows, 3),
    "columns": (columns, 2),
    "interleaved": (interleaved, 2),
    "a mesh": (mesh, 4),
    "pieces": (pieces, 2),
    "one rank": (rows, 1),
}
