"""`MergedWeights`: the model's weights with one adapter added, in tensors of their own that are published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from weightlane.sync.version.box import Box
from weightlane.sync.version.tensor_spec import LocalShard

from .adapter import LoraPair


@dataclass(frozen=True, slots=True)
class _MergedSlice:
    """A rectangle of a layer's weight on this rank: without the adapter, and with it."""

    pair: LoraPair
    box: Box
    """The rectangle of the full weight [rows, columns]."""
    base: torch.Tensor
    """The model's own weight, in its dtype."""
    merged: torch.Tensor
    """The published weight, in the dtype in which it is sent; its storage never moves."""

    def refresh(self) -> None:
        merge_slice(self.pair, self.box, self.base, self.merged)


class MergedWeights:
    """``W + scale * B A`` of the shards that were asked for, computed in float32 and rounded once, to the dtype on the wire."""

    def __init__(self) -> None:
        self._slices: dict[tuple[str, Sequence[int], torch.dtype], _MergedSlice] = {}

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are published."""
        return [piece.merged for piece in self._slices.values()]

    def shard(self, pair: LoraPair, box: Box, own: LocalShard) -> LocalShard:
        """Return the shard `own` of the model's own weight, which is the rectangle `box` of a layer's, with `pair` added.

        The same tensor is returned whenever it is asked for again.
        """
        key = own.spec.name, tuple(own.starts), own.spec.dtype
        if key not in self._slices:
            merged = torch.empty_like(own.data, dtype=own.spec.dtype, memory_format=torch.contiguous_format)
            self._slices[key] = _MergedSlice(pair, box, own.data, merged)
            self._slices[key].refresh()
        return replace(own, data=self._slices[key].merged)

    def refresh(self) -> None:
        """Recompute the merged weights from the model's own and from the adapter, so that no error accumulates over steps."""
        for piece in self._slices.values():
            piece.refresh()


@torch.no_grad()
def merge_slice(pair: LoraPair, box: Box, base: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``W + scale * B A`` [rows, columns] in float32 for `base`, the rectangle `box` of a layer's weight in any dtype.

    `out` may be of half precision: what is computed is then rounded once.
    """
    first_row, first_column = pair.site.held_rows[0], pair.site.held_columns[0]
    rows = slice(box.starts[0] - first_row, box.stops[0] - first_row)
    columns = slice(box.starts[1] - first_column, box.stops[1] - first_column)
    return torch.add(base, pair.up[rows] @ pair.down[:, columns], alpha=pair.scale, out=out)
