"""`MergedWeights`: the model's weights with one adapter added, in tensors of their own that are published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from weightlane.sync.version.box import Box

from .adapter import Adapter, LoraPair


@dataclass(frozen=True, slots=True)
class MergedSlice:
    """A rectangle of a layer's weight on this rank: without the adapter, and with it."""

    module: str
    box: Box
    """The rectangle of the full weight [rows, columns]."""
    base: torch.Tensor
    """The model's own weight, in its dtype."""
    merged: torch.Tensor
    """float32, the published weight; its storage never moves."""


class MergedWeights:
    """``W + scale * B A`` in float32 for every adapted layer.

    Args:
        slices: This rank's slices of the layers' weights.
        names: Every checkpoint tensor that steps change, on any rank, in the order of the checkpoint.
    """

    def __init__(self, slices: Sequence[MergedSlice], names: Sequence[str]) -> None:
        self.slices = slices
        self.names = names

    def refresh(self, adapter: Adapter) -> None:
        """Recompute the merged weights from the model's own and from `adapter`, so that no error accumulates over steps."""
        for piece in self.slices:
            if not piece.box.numel:
                continue
            merge_slice(adapter.pairs[piece.module], piece.box, piece.base, piece.merged)


@torch.no_grad()
def merge_slice(pair: LoraPair, box: Box, base: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``W + scale * B A``, float32 [rows, columns], for `base`, the rectangle `box` of a layer's weight in any dtype."""
    first_row, first_column = pair.site.held_rows[0], pair.site.held_columns[0]
    rows = slice(box.starts[0] - first_row, box.stops[0] - first_row)
    columns = slice(box.starts[1] - first_column, box.stops[1] - first_column)
    return torch.add(base, pair.up[rows] @ pair.down[:, columns], alpha=pair.scale, out=out)
