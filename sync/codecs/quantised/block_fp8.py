"""fp8 (e4m3) with a float32 scale for each block of 128 x 128: the format of DeepSeek-V3's checkpoints.

A matrix ``w`` of shape [r, c] becomes ``weight`` (float8_e4m3fn, [r, c]) and ``weight_scale_inv`` (float32,
[ceil(r / 128), ceil(c / 128)]), which vLLM loads with ``quant_method: fp8`` and ``weight_block_size: [128, 128]``. For every
block, in float32::

    scale = max |w| / 448        1 where the block is zero, at least 2**-126
    q = e4m3(clamp(w / scale, -448, 448))        rounded to nearest even;  w is about q * scale

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3, and its ``inference/kernel.py``.

A shard is any slice of the matrix. A block that its border divides is shared with the neighbours there: every rank computes
the `magnitudes` of its part, the ranks exchange them and take the maximum, and each quantises its part with the scale of what
results. The union is bit for bit what the whole matrix gives.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from .checks import check_finite, check_scales, check_shard, scales_from
from .quantisation_error import QuantisationReport

BLOCK = 128
LARGEST = 448.0
"""Largest finite e4m3 value."""
_HALF_STEPS = 256.0
"""What the same exponent bits stand for in float16, times this, they stand for in e4m3."""


def block_shape(columns: int) -> tuple[int, int]:  # noqa: ARG001 - that of `channel_int8` depends on it
    """Rows and columns of a block, in a matrix of so many columns."""
    return BLOCK, BLOCK


def blocks_along(first: int, count: int) -> range:
    """The blocks that `count` rows, or columns, from `first` on touch."""
    return range(first // BLOCK, -(-(first + count) // BLOCK)) if count else range(0)


def magnitudes(shard: torch.Tensor, *, at: tuple[int, int] = (0, 0), name: str = "the tensor") -> torch.Tensor:
    """Largest magnitude in each block, as far as this shard holds it.

    Args:
        shard: [rows, columns], float32, bfloat16 or float16.
        at: Its first row and column in the whole matrix.
        name: For errors.

    Returns:
        float32 of as many rows and columns of blocks as the shard touches.

    Raises:
        ManifestError: There is an inf or a NaN.
        ConfigError: `shard` is no matrix of floats.
    """
    check_shard(shard, name)
    rows, columns = _grid(shard, at)
    largest = torch.zeros(rows, columns, dtype=torch.float32, device=shard.device)
    if not columns:
        return largest
    padded = torch.zeros(columns * BLOCK, dtype=torch.float32, device=shard.device)
    mine = padded[at[1] % BLOCK :][: shard.shape[1]]
    for index, band in enumerate(_bands(shard, at[0])):
        mine.copy_(band.abs().amax(0))
        largest[index] = padded.view(columns, BLOCK).amax(1)
    check_finite(largest, name)
    return largest


def scales_of(amax: torch.Tensor) -> torch.Tensor:
    """Scales for largest magnitudes; both float32 of one shape."""
    return scales_from(amax, LARGEST)


def quantise(
    shard: torch.Tensor,
    scales: torch.Tensor,
    *,
    at: tuple[int, int] = (0, 0),
    name: str = "the tensor",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The shard's elements as float8_e4m3fn.

    Args:
        shard: As for `magnitudes`.
        scales: float32, for the same blocks as `magnitudes` returned, after the exchange.
        at: As for `magnitudes`.
        name: For errors.
        out: Where to put them: float8_e4m3fn of the shard's shape, on any device.

    Raises:
        ConfigError: `scales` has another shape.
    """
    check_shard(shard, name)
    check_scales(scales, _grid(shard, at), name)
    quantised = torch.empty(shard.shape, dtype=torch.float8_e4m3fn, device=shard.device) if out is None else out
    for target, band, scale in zip(_bands(quantised, at[0]), _bands(shard, at[0]), scales, strict=True):
        target.copy_((band.float() / _by_column(scale, shard, at[1])).clamp_(-LARGEST, LARGEST))
    return quantised


def dequantise(
    quantised: torch.Tensor,
    scales: torch.Tensor,
    *,
    at: tuple[int, int] = (0, 0),
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What quantised elements stand for: float32 of the same shape, or `out`, to whose type float32 is rounded."""
    check_scales(scales, _grid(quantised, at), "the quantised tensor")
    if out is None:
        out = torch.empty(quantised.shape, dtype=torch.float32, device=quantised.device)
    for target, band, scale in zip(_bands(out, at[0]), _bands(quantised, at[0]), scales, strict=True):
        target.copy_(_values(band).mul_(_by_column(scale * _HALF_STEPS, quantised, at[1])))
    return out


def report(
    shard: torch.Tensor, quantised: torch.Tensor, scales: torch.Tensor, *, at: tuple[int, int] = (0, 0)
) -> QuantisationReport:
    """The error of `quantised` against `shard`."""
    total = QuantisationReport()
    for before, band, scale in zip(_bands(shard, at[0]), _bands(quantised, at[0]), scales, strict=True):
        after = _values(band).mul_(_by_column(scale * _HALF_STEPS, shard, at[1]))
        total += QuantisationReport.of(before.float(), after)
    return total


def _grid(shard: torch.Tensor, at: tuple[int, int]) -> tuple[int, int]:
    rows, columns = (len(blocks_along(first, count)) for first, count in zip(at, shard.shape, strict=True))
    return rows, columns


def _bands(shard: torch.Tensor, first_row: int) -> Iterator[torch.Tensor]:
    """The shard's rows, row of blocks by row of blocks: at most 128 rows each, so that temporaries stay small."""
    for block_row in blocks_along(first_row, shard.shape[0]):
        start = max(block_row * BLOCK - first_row, 0)
        yield shard[start : (block_row + 1) * BLOCK - first_row]


def _values(codes: torch.Tensor) -> torch.Tensor:
    """The finite values of e4m3 `codes` over `_HALF_STEPS`, float32: exact, and several times as fast as torch's cast on CPUs.

    A code is a float16 with fewer bits on either side: sign and the rest move up, the exponents' biases differ by 8.
    """
    wide = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return wide.view(torch.float16).float()


def _by_column(scale: torch.Tensor, shard: torch.Tensor, first_column: int) -> torch.Tensor:
    return scale.repeat_interleave(BLOCK)[first_column % BLOCK :][: shard.shape[1]]
