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
    """The rectangle of the whole weight [rows, columns]."""
    base: torch.Tensor
    """float32, what the model loaded."""
    merged: torch.Tensor
    """float32, what is published; its storage stays where it is."""


class MergedWeights:
    """``W + scale * B A`` in float32 for every adapted layer.

    Args:
        slices: What this rank holds of the layers.
        names: Every checkpoint tensor that steps change, of all ranks, in the order of the checkpoint.
    """

    def __init__(self, slices: Sequence[MergedSlice], names: Sequence[str]) -> None:
        self.slices = slices
        self.names = names

    @torch.no_grad()
    def refresh(self, adapter: Adapter) -> None:
        """Compute everything from the weights that were loaded and from `adapter`: nothing adds up over the steps."""
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
    """Add an adapter, whole A and B by ``module|A|weight``, to whole float32 `weights` by checkpoint name, in place."""
    for key, up in adapter.items():
        module, matrix, kind = key.split("|")
        if (matrix, kind) == ("B", "weight"):
            weights[f"{module}.weight"].add_(up @ adapter[f"{module}|A|weight"], alpha=scale)
