"""`MergedWeights`: the model's weights with one adapter added, in tensors of their own that are published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weightlane.sync.version.box import Box

from .adapter import Adapter


@dataclass(frozen=True, slots=True)
class MergedSlice:
    """A rectangle of a layer's weight on this rank: without the adapter, and with it."""

    module: str
    box: Box
    """The rectangle of the full weight [rows, columns]."""
    base: torch.Tensor
    """float32, the model's own weight."""
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

    @torch.no_grad()
    def refresh(self, adapter: Adapter) -> None:
        """Recompute the merged weights from the model's own and from `adapter`, so that no error accumulates over steps."""
        for piece in self.slices:
            if not piece.box.numel:
                continue
            pair = adapter.pairs[piece.module]
            first_row, first_column = pair.site.held_rows[0], pair.site.held_columns[0]
            rows = slice(piece.box.starts[0] - first_row, piece.box.stops[0] - first_row)
            columns = slice(piece.box.starts[1] - first_column, piece.box.stops[1] - first_column)
            product = pair.up[rows] @ pair.down[:, columns]
            torch.add(piece.base, product, alpha=pair.scale, out=piece.merged)


def merge_whole(weights: Mapping[str, torch.Tensor], adapter: Mapping[str, torch.Tensor], scale: float) -> None:
    """Add an adapter, full A and B by ``module|A|weight``, to full float32 `weights` by checkpoint name, in place."""
    for key, up in adapter.items():
        module, matrix, kind = key.split("|")
        if (matrix, kind) == ("B", "weight"):
            weights[f"{module}.weight"].add_(up @ adapter[f"{module}|A|weight"], alpha=scale)
