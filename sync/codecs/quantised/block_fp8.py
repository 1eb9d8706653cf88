"""fp8 (e4m3) with a float32 scale for each block of 128 x 128: the format of DeepSeek-V3's checkpoints.

A matrix ``w`` of shape [r, c] becomes ``weight`` (float8_e4m3fn, [r, c]) and ``weight_scale_inv`` (float32,
[ceil(r / 128), ceil(c / 128)]), which vLLM loads with ``quant_method: fp8`` and ``weight_block_size: [128, 128]``. For every
block, in float32::

    scale = max |w| / 448        1 where the block is zero, at least 2**-126
    q = e4m3(clamp(w / scale, -448, 448))        rounded to nearest even;  w is about q * scale

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3, and its ``inference/kernel.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .quantiser import Quantiser

BLOCK = 128
LARGEST = 448.0
"""Largest finite e4m3 value."""
_BLOCK_ROWS = {"cpu": 1}
_DEVICE_BLOCK_ROWS = 32
"""Rows of blocks that are computed at once: one stays in a CPU's cache, and takes a device less time than starting the work."""
_HALF_STEPS = 256.0
"""Ratio of an e4m3 value to the float16 value with the same exponent bits: the exponents' biases differ by 8."""


class BlockFp8(Quantiser):
    """See the module."""

    dtype = torch.float8_e4m3fn
    steps = LARGEST

    def block_shape(self, columns: int) -> tuple[int, int]:  # noqa: ARG002 - every block is a square
        """See `Quantiser`."""
        return BLOCK, BLOCK

    def _grid(self, shape: torch.Size, at: tuple[int, int]) -> tuple[int, int]:
        rows, columns = (len(_blocks_along(first, count)) for first, count in zip(at, shape, strict=True))
        return rows, columns

    def _largest(self, data: torch.Tensor, at: tuple[int, int], out: torch.Tensor) -> None:
        columns, left = out.shape[1], at[1] % BLOCK
        for blocks, rows, top in _bands(at[0], data.shape[0], data.device):
            part, height, first = data[rows].abs(), BLOCK * len(out[blocks]), top
            if height == BLOCK:  # several times as fast on a CPU, and the same
                part, height, first = part.amax(0, keepdim=True), 1, 0
            padded = torch.zeros(height, BLOCK * columns, dtype=torch.float32, device=data.device)
            padded[first : first + len(part), left : left + data.shape[1]] = part
            out[blocks] = padded.view(len(out[blocks]), -1, columns, BLOCK).amax((1, 3))

    def _bands(
        self, scales: torch.Tensor, shape: torch.Size, at: tuple[int, int]
    ) -> Iterator[tuple[slice, torch.Tensor]]:
        left = at[1] % BLOCK
        for blocks, rows, top in _bands(at[0], shape[0], scales.device):
            scale = scales[blocks].repeat_interleave(BLOCK, 1)[:, left : left + shape[1]]
            if len(scale) > 1:
                scale = scale.repeat_interleave(BLOCK, 0)[top : top + len(range(*rows.indices(shape[0])))]
            yield rows, scale

    def _encoded(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.clamp_(-LARGEST, LARGEST)

    def _decoded(self, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        # A code is a float16 with fewer bits on either side. Moving its bits there is exact for finite values, and several
        # times as fast as torch's cast on CPUs.
        wide = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
        return wide.view(torch.float16).float().mul_(scale * _HALF_STEPS)


def _blocks_along(first: int, count: int) -> range:
    """The blocks that `count` rows, or columns, from `first` on touch."""
    return range(first // BLOCK, -(-(first + count) // BLOCK)) if count else range(0)


def _bands(first_row: int, rows: int, device: torch.device) -> Iterator[tuple[slice, slice, int]]:
    """Bands of a slice: its rows of blocks, its rows, and the place of the first of these in its block."""
    touched = _blocks_along(first_row, rows)
    together = _BLOCK_ROWS.get(device.type, _DEVICE_BLOCK_ROWS)
    for first in range(0, len(touched), together):
        start = max(touched[first] * BLOCK - first_row, 0)
        stop = (touched[first] + together) * BLOCK - first_row
        yield slice(first, first + together), slice(start, stop), (first_row + start) % BLOCK
