"""fp8 (e4m3) with a float32 scale for each block of 128 x 128: the format of DeepSeek-V3's checkpoints.

A matrix ``w`` of shape [r, c] becomes ``weight`` (float8_e4m3fn, [r, c]) and ``weight_scale_inv`` (float32,
[ceil(r / 128), ceil(c / 128)]), which vLLM loads with ``quant_method: fp8`` and ``weight_block_size: [128, 128]``. For every
block, in float32::

    scale = max |w| / 448        1 where the block is zero, at least 2**-126
    q = e4m3(clamp(w / scale, -448, 448))        rounded to nearest even;  w is about q * scale

A slice may divide a block. Then every rank computes the `magnitudes` of its part, the ranks exchange them and take the maximum,
and each quantises its part with the scales of the result. Together the parts are bit for bit the quantised matrix.

In all functions `at` is the first row and column of the slice in the matrix, and `name` names the matrix in errors.

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3, and its ``inference/kernel.py``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import ConfigError, ManifestError

BLOCK = 128
DTYPE = torch.float8_e4m3fn
"""Dtype of quantised elements."""
LARGEST = 448.0
"""Largest finite e4m3 value."""
_PART = "quantiser"
_SOURCES = (torch.float32, torch.bfloat16, torch.float16)
_BLOCK_ROWS = {"cpu": 1}
_DEVICE_BLOCK_ROWS = 32
"""Rows of blocks that are computed at once: one stays in a CPU's cache, and takes a device less time than starting the work."""
_HALF_STEPS = 256.0
"""Ratio of an e4m3 value to the float16 value with the same exponent bits: the exponents' biases differ by 8."""
_CORNER = (0, 0)


@dataclass(frozen=True, slots=True)
class QuantisationReport:
    """The error of one tensor or of several, in float32. Reports of shards add up with ``+``."""

    elements: int = 0
    max_abs: float = 0.0
    """Largest absolute error."""
    squared_error: float = 0.0
    """Sum of the squared errors."""
    squared: float = 0.0
    """Sum of the squared original values."""

    @property
    def relative_rms(self) -> float:
        """Root mean square of the error over that of the values; 0 if all values are 0."""
        return math.sqrt(self.squared_error / self.squared) if self.squared else 0.0

    def to_plain(self) -> tuple[int, float, float, float]:
        """The fields in order, as JSON."""
        return self.elements, self.max_abs, self.squared_error, self.squared

    def __add__(self, other: QuantisationReport) -> QuantisationReport:
        return QuantisationReport(
            self.elements + other.elements,
            max(self.max_abs, other.max_abs),
            self.squared_error + other.squared_error,
            self.squared + other.squared,
        )

    @classmethod
    def of(cls, before: torch.Tensor, after: torch.Tensor) -> QuantisationReport:
        """Compare two float32 tensors of one shape."""
        if not before.numel():
            return cls()
        error = after - before
        return cls(
            before.numel(),
            float(error.abs().max()),
            float(error.double().square().sum()),
            float(before.double().square().sum()),
        )


def magnitudes(data: torch.Tensor, *, at: tuple[int, ...] = _CORNER, name: str = "the tensor") -> torch.Tensor:
    """The largest magnitude in each block, as far as `data` holds the block.

    Args:
        data: [rows, columns], float32, bfloat16 or float16.
        at: See the module.
        name: See the module.

    Returns:
        float32, with the rows and columns of blocks that the slice touches.

    Raises:
        ManifestError: `data` has an inf or a NaN.
        ConfigError: `data` is no matrix of floats.
    """
    _check_matrix(data, name)
    largest = torch.zeros(_grid(data.shape, at), dtype=torch.float32, device=data.device)
    if data.numel():
        _largest(data, at, largest)
    if not torch.isfinite(largest).all():
        raise ManifestError(
            f"{name} holds inf or NaN, which no scale can represent.",
            part=_PART,
            hint="The training has diverged, or send this tensor as it is.",
        )
    return largest


def scales_of(largest: torch.Tensor) -> torch.Tensor:
    """Scales for largest magnitudes: ``largest / 448``, 1 for a zero block, never below the smallest normal number."""
    # By a tensor: CUDA multiplies by the reciprocal of a plain number, which rounds otherwise than the division of a CPU.
    scales = (largest / torch.full_like(largest, LARGEST)).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(largest == 0, torch.ones_like(scales), scales)


def quantise(
    data: torch.Tensor,
    scales: torch.Tensor,
    *,
    at: tuple[int, ...] = _CORNER,
    name: str = "the tensor",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Quantise a slice.

    Args:
        data: See `magnitudes`.
        scales: float32, of the blocks that the slice touches, after the exchange of their magnitudes.
        at: See the module.
        name: See the module.
        out: Memory for the result: `DTYPE`, with the shape of `data`, on any device.

    Raises:
        ConfigError: `data` is no matrix of floats.
    """
    _check_matrix(data, name)
    if out is None:
        out = torch.empty(data.shape, dtype=DTYPE, device=data.device)
    for rows, scale in _scaled_bands(scales, data.shape, at):
        out[rows].copy_((data[rows].float() / scale).clamp_(-LARGEST, LARGEST))
    return out


def dequantise(
    quantised: torch.Tensor,
    scales: torch.Tensor,
    *,
    at: tuple[int, ...] = _CORNER,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Restore the values of a slice: float32, or `out`, to whose dtype float32 is rounded."""
    if out is None:
        out = torch.empty(quantised.shape, dtype=torch.float32, device=quantised.device)
    for rows, scale in _scaled_bands(scales, quantised.shape, at):
        out[rows].copy_(_decoded(quantised[rows], scale))
    return out


def error_of(
    data: torch.Tensor, quantised: torch.Tensor, scales: torch.Tensor, *, at: tuple[int, ...] = _CORNER
) -> QuantisationReport:
    """The error of `quantised` against `data`."""
    total = QuantisationReport()
    for rows, scale in _scaled_bands(scales, data.shape, at):
        total += QuantisationReport.of(data[rows].float(), _decoded(quantised[rows], scale))
    return total


def _decoded(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 values of quantised elements."""
    # A code is a float16 with fewer bits on either side. Moving its bits there is exact for finite values, and several times as
    # fast as torch's cast on CPUs.
    wide = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return wide.view(torch.float16).float().mul_(scale * _HALF_STEPS)


def _largest(data: torch.Tensor, at: tuple[int, ...], out: torch.Tensor) -> None:
    """Write the largest magnitude in each block of `data`, which is not empty, to `out`."""
    columns, left = out.shape[1], at[1] % BLOCK
    for blocks, rows, top in _bands(at[0], data.shape[0], data.device):
        part, height, first = data[rows].abs(), BLOCK * len(out[blocks]), top
        if height == BLOCK:  # several times as fast on a CPU, and the same
            part, height, first = part.amax(0, keepdim=True), 1, 0
        padded = torch.zeros(height, BLOCK * columns, dtype=torch.float32, device=data.device)
        padded[first : first + len(part), left : left + data.shape[1]] = part
        out[blocks] = padded.view(len(out[blocks]), -1, columns, BLOCK).amax((1, 3))


def _scaled_bands(scales: torch.Tensor, shape: torch.Size, at: tuple[int, ...]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Bands of rows of a slice, which keep temporary tensors small, each with its scales in a shape that broadcasts."""
    left = at[1] % BLOCK
    for blocks, rows, top in _bands(at[0], shape[0], scales.device):
        scale = scales[blocks].repeat_interleave(BLOCK, 1)[:, left : left + shape[1]]
        if len(scale) > 1:
            scale = scale.repeat_interleave(BLOCK, 0)[top : top + len(range(*rows.indices(shape[0])))]
        yield rows, scale


def _bands(first_row: int, rows: int, device: torch.device) -> Iterator[tuple[slice, slice, int]]:
    """Bands of a slice: its rows of blocks, its rows, and the place of the first of these in its block."""
    touched = _blocks_along(first_row, rows)
    together = _BLOCK_ROWS.get(device.type, _DEVICE_BLOCK_ROWS)
    for first in range(0, len(touched), together):
        start = max(touched[first] * BLOCK - first_row, 0)
        stop = (touched[first] + together) * BLOCK - first_row
        yield slice(first, first + together), slice(start, stop), (first_row + start) % BLOCK


def _grid(shape: torch.Size, at: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of the blocks that a slice of `shape` touches."""
    rows, columns = (len(_blocks_along(first, count)) for first, count in zip(at, shape, strict=True))
    return rows, columns


def _blocks_along(first: int, count: int) -> range:
    """The blocks that `count` rows, or columns, from `first` on touch."""
    return range(first // BLOCK, -(-(first + count) // BLOCK)) if count else range(0)


def _check_matrix(data: torch.Tensor, name: str) -> None:
    if data.dim() != 2 or data.dtype not in _SOURCES:  # noqa: PLR2004 - a matrix
        raise ConfigError(
            f"{name} has shape {tuple(data.shape)} and dtype {data.dtype}.",
            part=_PART,
            hint="Matrices of float32, bfloat16 or float16 are quantised; send everything else as it is.",
        )
