"""What the modules `block_fp8` and `channel_int8` have in common, for those to whom it is one which of them quantises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from . import block_fp8, channel_int8
from .checkpoint import Scheme
from .quantisation_error import QuantisationReport


class Quantiser(Protocol):
    """Elements that share a scale are a block. `at` is the first row and column of a slice in the whole matrix."""

    def block_shape(self, columns: int) -> tuple[int, int]:
        """Rows and columns of a block, in a matrix of so many columns."""

    def magnitudes(self, shard: torch.Tensor, *, at: tuple[int, int] = ..., name: str = ...) -> torch.Tensor:
        """Largest magnitude in each block that the shard touches, as far as it holds it; `ManifestError` for inf and NaN."""

    def scales_of(self, amax: torch.Tensor) -> torch.Tensor:
        """Scales for largest magnitudes; both float32 of one shape."""

    def quantise(
        self,
        shard: torch.Tensor,
        scales: torch.Tensor,
        *,
        at: tuple[int, int] = ...,
        name: str = ...,
        out: torch.Tensor | None = ...,
    ) -> torch.Tensor:
        """The shard's elements, quantised with the scales of the blocks that it touches; in `out` if that is given."""

    def dequantise(
        self,
        quantised: torch.Tensor,
        scales: torch.Tensor,
        *,
        at: tuple[int, int] = ...,
        out: torch.Tensor | None = ...,
    ) -> torch.Tensor:
        """What quantised elements stand for: float32, or `out`, to whose type float32 is rounded."""

    def report(
        self, shard: torch.Tensor, quantised: torch.Tensor, scales: torch.Tensor, *, at: tuple[int, int] = ...
    ) -> QuantisationReport:
        """The error of `quantised` against `shard`."""


QUANTISERS: Mapping[Scheme, Quantiser] = {"fp8": block_fp8, "int8": channel_int8}
