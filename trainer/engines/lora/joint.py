"""Passes shared by several adapters: which can be joined, and a layer's A and B for tokens of different adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import pad

from ...objectives.loss import LossSums, OutputName, needed_outputs
from ..contract import ForwardBackward
from .adapter import Adapter, LoraPair
from .sites import MATRICES

_PADDED = 2.0
"""Most tokens, padding included, per token of a pass for which adapters are computed with stacked matrices."""


@dataclass(frozen=True, slots=True)
class StartedPass:
    """A checked `ForwardBackward` whose mini-batch has been started, ready to be computed."""

    call: ForwardBackward
    adapter: Adapter | None
    """None for the model's own weights."""
    sums: LossSums

    @property
    def shape(self) -> tuple[object, ...] | None:
        """A key that is equal for passes that can be joined; None for a pass that cannot be."""
        packed = self.call.batch.packed
        if self.adapter is None or packed.sequences_per_unit > 1:
            return None
        return packed.targets.shape[1:], *sorted(packed.per_sequence)

    @property
    def needed(self) -> set[OutputName]:
        """The model's outputs that the loss needs or the call returns."""
        return {*self.call.outputs, *needed_outputs(self.call.function)}


@dataclass(frozen=True, slots=True)
class JointPairs:
    """A and B of one layer for tokens [..., N, width] of a packed pass with one run of tokens per adapter."""

    runs: Sequence[tuple[LoraPair | None, int]]
    """A and B, or None, and the number of tokens of each run; N tokens in all. At least one run has A and B."""

    @property
    def width(self) -> int:
        """The largest rank of the adapters."""
        return max(pair.width for pair, _ in self.runs if pair is not None)

    def lowered(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute A x: [..., N, largest rank]; 0 beyond a run's own rank."""
        width = self.width
        return self._each_run(inputs, width, lambda pair, part: pad(pair.lowered(part), (0, width - pair.width)))

    def raised(self, low: torch.Tensor) -> torch.Tensor:
        """Compute scale * B (A x): [..., N, held rows]."""
        return self._each_run(low, self._rows, lambda pair, part: pair.raised(part[..., : pair.width]))

    def added(self, inputs: torch.Tensor) -> torch.Tensor:
        """Compute both products, for a layer that needs no collective in between."""
        pairs, counts = [pair for pair, _ in self.runs if pair is not None], [count for _, count in self.runs]
        alike = len(pairs) == len(counts) and len({pair.width for pair in pairs}) == 1
        if alike and len(counts) * max(counts) <= _PADDED * sum(counts):
            return _stacked(pairs, counts, inputs)
        return self._each_run(inputs, self._rows, LoraPair.added)

    @property
    def _rows(self) -> int:
        return next(len(pair.up) for pair, _ in self.runs if pair is not None)

    def _each_run(
        self, tensor: torch.Tensor, width: int, compute: Callable[[LoraPair, torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Compute each run's part of `tensor` with its pair; zeros of `width` for a run without one."""
        parts = torch.split(tensor, [count for _, count in self.runs], dim=-2)
        computed = [
            part.new_zeros(*part.shape[:-1], width) if pair is None else compute(pair, part)
            for (pair, _), part in zip(self.runs, parts, strict=True)
        ]
        return torch.cat(computed, dim=-2)


def _stacked(pairs: Sequence[LoraPair], counts: Sequence[int], inputs: torch.Tensor) -> torch.Tensor:
    """Compute `JointPairs.added` for pairs of equal rank with two batched products instead of two for every pair.

    Shorter runs are padded with their own last token, so that tokens of different adapters are never mixed.
    """
    flat, padded = inputs.reshape(-1, inputs.shape[-1]), min(counts) < max(counts)
    places, real = _places(tuple(counts), inputs.device)
    if padded:
        flat = flat[places]
    down, up = (
        torch.stack([pair.matrices[matrix] for pair in pairs]).to(inputs.dtype).transpose(1, 2) for matrix in MATRICES
    )
    low = torch.bmm(flat.view(len(pairs), max(counts), -1), down)
    exact = torch.promote_types(inputs.dtype, torch.float32)
    low = (low * _scales(tuple(pair.scale for pair in pairs), exact, inputs.device)).to(inputs.dtype)
    added = torch.bmm(low, up).flatten(0, 1)
    return (added[real] if padded else added).view(*inputs.shape[:-1], -1)


@lru_cache(maxsize=16)  # every layer of a pass needs the same, and computing it waits for the GPU
def _places(counts: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return indices that pad consecutive runs of these lengths: the token at each padded place, and the places of real tokens.

    int64 [runs * longest] and int64 [tokens].
    """
    places, lengths = torch.arange(max(counts), device=device), torch.tensor(counts, device=device)
    first = lengths.cumsum(0) - lengths
    tokens = first[:, None] + torch.minimum(places, lengths[:, None] - 1)
    return tokens.flatten(), (places < lengths[:, None]).flatten().nonzero().squeeze(1)


@lru_cache(maxsize=16)
def _scales(scales: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return `dtype` [runs, 1, 1]: at least float32, so that a product is rounded once, as by a number that is no tensor."""
    return torch.tensor(scales, dtype=dtype, device=device)[:, None, None]


LayerPair = LoraPair | JointPairs
"""A and B of a layer, for one adapter or for several."""
