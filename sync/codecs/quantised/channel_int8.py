"""int8 with a float32 scale for each row (output channel): the format of compressed-tensors' W8A8 checkpoints.

A matrix ``w`` of shape [r, c] becomes ``weight`` (int8, [r, c]) and ``weight_scale`` (float32, [r, 1]), which vLLM loads with
``quant_method: compressed-tensors``. For every row, in float32::

    scale = max |w| / 127.5      1 where the row is zero, at least 2**-126
    q = clamp(round(w / scale), -128, 127)       ties to even;  w is about q * scale

Source: ``compressed_tensors.quantization.utils.calculate_qparams`` for symmetric 8-bit integers.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .quantiser import Quantiser

_BAND_ROWS = 256
"""Rows that are widened to float32 at once."""


class ChannelInt8(Quantiser):
    """See the module."""

    dtype = torch.int8
    steps = 127.5

    def block_shape(self, columns: int) -> tuple[int, int]:
        """See `Quantiser`."""
        return 1, columns

    def _grid(self, shape: torch.Size, at: tuple[int, int]) -> tuple[int, int]:  # noqa: ARG002 - a row is a block
        return shape[0], 1

    def _largest(self, data: torch.Tensor, at: tuple[int, int], out: torch.Tensor) -> None:  # noqa: ARG002
        for rows in _bands(data.shape[0]):
            out[rows, 0] = data[rows].abs().amax(1)

    def _bands(
        self,
        scales: torch.Tensor,
        shape: torch.Size,
        at: tuple[int, int],  # noqa: ARG002
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        for rows in _bands(shape[0]):
            yield rows, scales[rows]

    def _encoded(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.round_().clamp_(-128, 127)

    def _decoded(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return codes.float().mul_(scale)


def _bands(rows: int) -> Iterator[slice]:
    for start in range(0, rows, _BAND_ROWS):
        yield slice(start, start + _BAND_ROWS)
