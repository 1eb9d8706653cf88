"""fp8 (e4m3) with a float32 scale for each block of 128 x 128: the format of DeepSeek-V3's checkpoints.

A matrix ``w`` of shape [r, c] becomes ``weight`` (float8_e4m3fn, [r, c]) and ``weight_scale_inv`` (float32,
[ceil(r / 128), ceil(c / 128)]), which vLLM loads with ``quant_method: fp8`` and ``weight_block_size: [128, 128]``. For every
block, in float32::

    scale = max |w| / 448        1 where the block is zero, at least 2**-126
    q = e4m3(clamp(w / scale, -448, 448))        rounded to nearest even;  w is about q * scale

Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.3, and its ``inference/kernel.py``.

Shards are runs of rows. One that begins or ends inside a block shares that block with its neighbours: every rank computes
`block_amax` of its rows, the rows of blocks named by `shared_block_rows` are exchanged and their maximum taken, and each rank
quantises its rows with the scales of what results. The union is bit for bit what the whole matrix gives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from .checks import check_finite, check_scales, check_shard, scales_from
from .report import QuantisationReport

BLOCK = 128
LARGEST = 448.0
"""Largest finite e4m3 value."""
_HALF_STEPS = 256.0
"""What the same exponent bits stand for in float16, times this, they stand for in e4m3."""


def block_rows(first_row: int, rows: int) -> range:
    """The rows of blocks that matrix rows [`first_row`, `first_row` + `rows`) touch."""
    return range(first_row // BLOCK, -(-(first_row + rows) // BLOCK)) if rows else range(0)


def shared_block_rows(shards: Sequence[tuple[int, int]]) -> dict[int, list[int]]:
    """Which rows of blocks several shards touch.

    Args:
        shards: (first row, number of rows) of every rank's shard.

    Returns:
        For each shared row of blocks the ranks that must exchange its magnitudes, e.g. ``{0: [0, 1]}``.
    """
    holders: dict[int, list[int]] = {}
    for rank, (first_row, rows) in enumerate(shards):
        for block_row in block_rows(first_row, rows):
            holders.setdefault(block_row, []).append(rank)
    return {block_row: ranks for block_row, ranks in sorted(holders.items()) if len(ranks) > 1}


def block_amax(shard: torch.Tensor, first_row: int, *, name: str = "the tensor") -> torch.Tensor:
    """Largest magnitude in each block, as far as this shard holds it.

    Args:
        shard: [rows, c], float32, bfloat16 or float16.
        first_row: Where its rows begin in the whole matrix.
        name: For errors.

    Returns:
        float32 [len(block_rows(first_row, rows)), ceil(c / 128)].

    Raises:
        ManifestError: There is an inf or a NaN.
        ConfigError: `shard` is no matrix of floats.
    """
    check_shard(shard, name)
    columns = -(-shard.shape[1] // BLOCK)
    amax = torch.zeros(len(block_rows(first_row, shard.shape[0])), columns, dtype=torch.float32, device=shard.device)
    if not columns:
        return amax
    padded = torch.zeros(columns * BLOCK, dtype=torch.float32, device=shard.device)
    for index, band in enumerate(_bands(shard, first_row)):
        padded[: shard.shape[1]] = band.abs().amax(0)
        amax[index] = padded.view(columns, BLOCK).amax(1)
    check_finite(amax, name)
    return amax


def scales_of(amax: torch.Tensor) -> torch.Tensor:
    """Scales for largest magnitudes; both float32 of one shape."""
    return scales_from(amax, LARGEST)


def quantise(
    shard: torch.Tensor,
    first_row: int,
    scales: torch.Tensor,
    *,
    name: str = "the tensor",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The shard's elements as float8_e4m3fn.

    Args:
        shard: As for `block_amax`.
        first_row: As for `block_amax`.
        scales: float32, for the same rows of blocks as `block_amax` returned, magnitudes exchanged.
        name: For errors.
        out: Where to put them: float8_e4m3fn of the shard's shape, on any device.

    Raises:
        ConfigError: `scales` has another shape.
    """
    check_shard(shard, name)
    _check_scales(shard, first_row, scales, name)
    quantised = torch.empty(shard.shape, dtype=torch.float8_e4m3fn, device=shard.device) if out is None else out
    for target, band, scale in zip(_bands(quantised, first_row), _bands(shard, first_row), scales, strict=True):
        target.copy_((band.float() / _by_column(scale, shard)).clamp_(-LARGEST, LARGEST))
    return quantised


def dequantise(
    quantised: torch.Tensor, first_row: int, scales: torch.Tensor, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """What quantised elements stand for: float32 of the same shape, or `out`, to whose type float32 is rounded."""
    _check_scales(quantised, first_row, scales, "the quantised tensor")
    if out is None:
        out = torch.empty(quantised.shape, dtype=torch.float32, device=quantised.device)
    for target, band, scale in zip(_bands(out, first_row), _bands(quantised, first_row), scales, strict=True):
        target.copy_(_values(band).mul_(_by_column(scale * _HALF_STEPS, quantised)))
    return out


def report(shard: torch.Tensor, quantised: torch.Tensor, first_row: int, scales: torch.Tensor) -> QuantisationReport:
    """The error of `quantised` against `shard`."""
    total = QuantisationReport()
    for before, band, scale in zip(_bands(shard, first_row), _bands(quantised, first_row), scales, strict=True):
        total += QuantisationReport.of(before.float(), _values(band).mul_(_by_column(scale * _HALF_STEPS, shard)))
    return total


def _bands(shard: torch.Tensor, first_row: int) -> Iterator[torch.Tensor]:
    """The shard's rows, row of blocks by row of blocks: at most 128 rows each, so that temporaries stay small."""
    for block_row in block_rows(first_row, shard.shape[0]):
        start = max(block_row * BLOCK - first_row, 0)
        yield shard[start : (block_row + 1) * BLOCK - first_row]


def _values(codes: torch.Tensor) -> torch.Tensor:
    """The finite values of e4m3 `codes` over `_HALF_STEPS`, float32: exact, and several times as fast as torch's cast on CPUs.

    A code is a float16 with fewer bits on either side: sign and the rest move up, the exponents' biases differ by 8.
    """
    wide = codes.view(torch.int8).to(torch.int16).bitwise_left_shift_(7).bitwise_and_(~0x4000)
    return wide.view(torch.float16).float()


def _by_column(scale: torch.Tensor, shard: torch.Tensor) -> torch.Tensor:
    return scale.repeat_interleave(BLOCK)[: shard.shape[1]]


def _check_scales(shard: torch.Tensor, first_row: int, scales: torch.Tensor, name: str) -> None:
    rows = len(block_rows(first_row, shard.shape[0]))
    check_scales(scales, (rows, -(-shard.shape[1] // BLOCK)), name)
