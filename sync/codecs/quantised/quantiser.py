"""The quantiser of one scheme: elements of a matrix with one float32 scale for each block of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from weightlane.ckpt_engines import ConfigError, ManifestError

from .quantisation_error import QuantisationReport

_PART = "quantiser"
_SOURCES = (torch.float32, torch.bfloat16, torch.float16)


class Quantiser(ABC):
    """Quantises matrices, or slices of them, and restores them.

    A slice may divide a block. Then every rank computes the `magnitudes` of its part, the ranks exchange them and take the
    maximum, and each quantises its part with the scales of the result. Together the parts are bit for bit the quantised matrix.

    In all methods `at` is the first row and column of the slice in the matrix, and `name` names the matrix in errors.
    """

    dtype: torch.dtype
    """Dtype of quantised elements."""
    steps: float
    """The largest magnitude of a block over its scale."""

    @abstractmethod
    def block_shape(self, columns: int) -> tuple[int, int]:
        """Rows and columns of a block in a matrix with so many columns."""

    @abstractmethod
    def _grid(self, shape: torch.Size, at: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of the blocks that a slice of `shape` touches."""

    @abstractmethod
    def _largest(self, data: torch.Tensor, at: tuple[int, int], out: torch.Tensor) -> None:
        """Write the largest magnitude in each block of `data`, which is not empty, to `out`."""

    @abstractmethod
    def _bands(
        self, scales: torch.Tensor, shape: torch.Size, at: tuple[int, int]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        """Bands of rows of a slice, which keep temporary tensors small, each with its scales in a shape that broadcasts."""

    @abstractmethod
    def _encoded(self, scaled: torch.Tensor) -> torch.Tensor:
        """Values over their scale, rounded to `dtype` or ready to be cast to it; may overwrite `scaled`."""

    @abstractmethod
    def _decoded(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """The float32 values of quantised elements."""

    def magnitudes(self, data: torch.Tensor, *, at: tuple[int, int] = (0, 0), name: str = "the tensor") -> torch.Tensor:
        """The largest magnitude in each block, as far as `data` holds the block.

        Args:
            data: [rows, columns], float32, bfloat16 or float16.
            at: See the class.
            name: See the class.

        Returns:
            float32, with the rows and columns of blocks that the slice touches.

        Raises:
            ManifestError: `data` has an inf or a NaN.
            ConfigError: `data` is no matrix of floats.
        """
        _check_matrix(data, name)
        largest = torch.zeros(self._grid(data.shape, at), dtype=torch.float32, device=data.device)
        if data.numel():
            self._largest(data, at, largest)
        if not torch.isfinite(largest).all():
            raise ManifestError(
                f"{name} holds inf or NaN, which no scale can represent.",
                part=_PART,
                hint="The training has diverged, or send this tensor as it is.",
            )
        return largest

    def scales_of(self, largest: torch.Tensor) -> torch.Tensor:
        """Scales for largest magnitudes: ``largest / steps``, 1 for a zero block, never below the smallest normal number."""
        # By a tensor: CUDA multiplies by the reciprocal of a plain number, which rounds otherwise than the division of a CPU.
        scales = (largest / torch.full_like(largest, self.steps)).clamp_min(torch.finfo(torch.float32).tiny)
        return torch.where(largest == 0, torch.ones_like(scales), scales)

    def quantise(
        self,
        data: torch.Tensor,
        scales: torch.Tensor,
        *,
        at: tuple[int, int] = (0, 0),
        name: str = "the tensor",
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Quantise a slice.

        Args:
            data: See `magnitudes`.
            scales: float32, of the blocks that the slice touches, after the exchange of their magnitudes.
            at: See the class.
            name: See the class.
            out: Memory for the result: `dtype`, with the shape of `data`, on any device.

        Raises:
            ConfigError: `scales` has another shape, or `data` is no matrix of floats.
        """
        _check_matrix(data, name)
        self._check_scales(scales, data.shape, at, name)
        if out is None:
            out = torch.empty(data.shape, dtype=self.dtype, device=data.device)
        for rows, scale in self._bands(scales, data.shape, at):
            out[rows].copy_(self._encoded(data[rows].float() / scale))
        return out

    def dequantise(
        self,
        quantised: torch.Tensor,
        scales: torch.Tensor,
        *,
        at: tuple[int, int] = (0, 0),
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Restore the values of a slice: float32, or `out`, to whose dtype float32 is rounded."""
        self._check_scales(scales, quantised.shape, at, "the quantised tensor")
        if out is None:
            out = torch.empty(quantised.shape, dtype=torch.float32, device=quantised.device)
        for rows, scale in self._bands(scales, quantised.shape, at):
            out[rows].copy_(self._decoded(quantised[rows], scale))
        return out

    def report(
        self, data: torch.Tensor, quantised: torch.Tensor, scales: torch.Tensor, *, at: tuple[int, int] = (0, 0)
    ) -> QuantisationReport:
        """The error of `quantised` against `data`."""
        total = QuantisationReport()
        for rows, scale in self._bands(scales, data.shape, at):
            total += QuantisationReport.of(data[rows].float(), self._decoded(quantised[rows], scale))
        return total

    def _check_scales(self, scales: torch.Tensor, shape: torch.Size, at: tuple[int, int], name: str) -> None:
        grid = self._grid(shape, at)
        if tuple(scales.shape) != grid or scales.dtype != torch.float32:
            raise ConfigError(
                f"{name} needs float32 scales of shape {grid}, there are {scales.dtype} of {tuple(scales.shape)}.",
                part=_PART,
                hint="Pass the result of scales_of for the exchanged magnitudes of the same blocks.",
            )


def _check_matrix(data: torch.Tensor, name: str) -> None:
    if data.dim() != 2 or data.dtype not in _SOURCES:  # noqa: PLR2004 - a matrix
        raise ConfigError(
            f"{name} has shape {tuple(data.shape)} and dtype {data.dtype}.",
            part=_PART,
            hint="Matrices of float32, bfloat16 or float16 are quantised; send everything else as it is.",
        )
