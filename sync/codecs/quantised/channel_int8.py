"""int8 with a float32 scale for each row (output channel): the format of compressed-tensors' W8A8 checkpoints.

A matrix ``w`` of shape [r, c] becomes ``weight`` (int8, [r, c]) and ``weight_scale`` (float32, [r, 1]), which vLLM loads with
``quant_method: compressed-tensors``. For every row, in float32::

    scale = max |w| / 127.5      1 where the row is zero, at least 2**-126
    q = clamp(round(w / scale), -128, 127)       ties to even;  w is about q * scale

Source: ``compressed_tensors.quantization.utils.calculate_qparams`` for symmetric 8-bit integers. A row is what a block is in
`block_fp8`: ranks that hold parts of one exchange its `magnitudes`.
"""

from __future__ import annotations

import torch

from .checks import check_finite, check_scales, check_shard, scales_from
from .quantisation_error import QuantisationReport

STEPS = 127.5
_BAND_ROWS = 256
"""Rows that are widened to float32 at once."""


def block_shape(columns: int) -> tuple[int, int]:
    """Rows and columns of what has one scale, in a matrix of so many columns."""
    return 1, columns


def magnitudes(
    shard: torch.Tensor,
    *,
    at: tuple[int, int] = (0, 0),  # noqa: ARG001 - wherever it is, its rows are theirs
    name: str = "the tensor",
) -> torch.Tensor:
    """Largest magnitude of each row, float32 [rows, 1], of a shard [rows, c] of float32, bfloat16 or float16.

    Raises:
        ManifestError: There is an inf or a NaN.
        ConfigError: `shard` is no matrix of floats.
    """
    check_shard(shard, name)
    largest = torch.zeros(shard.shape[0], 1, dtype=torch.float32, device=shard.device)
    if shard.numel():
        for start in range(0, shard.shape[0], _BAND_ROWS):
            largest[start : start + _BAND_ROWS, 0] = shard[start : start + _BAND_ROWS].abs().amax(1)
    check_finite(largest, name)
    return largest


def scales_of(amax: torch.Tensor) -> torch.Tensor:
    """Scales for largest magnitudes; both float32 [rows, 1]."""
    return scales_from(amax, STEPS)


def quantise(
    shard: torch.Tensor,
    scales: torch.Tensor,
    *,
    at: tuple[int, int] = (0, 0),  # noqa: ARG001 - as for `magnitudes`
    name: str = "the tensor",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The shard's elements as int8, with the scales of its rows (float32 [rows, 1]); in `out` if that is given.

    Raises:
        ConfigError: `scales` has another shape.
    """
    check_shard(shard, name)
    check_scales(scales, (shard.shape[0], 1), name)
    quantised = torch.empty(shard.shape, dtype=torch.int8, device=shard.device) if out is None else out
    for start in range(0, shard.shape[0], _BAND_ROWS):
        rows = slice(start, start + _BAND_ROWS)
        quantised[rows] = (shard[rows].float() / scales[rows]).round_().clamp_(-128, 127)
    return quantised


def dequantise(
    quantised: torch.Tensor,
    scales: torch.Tensor,
    *,
    at: tuple[int, int] = (0, 0),  # noqa: ARG001 - as for `magnitudes`
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """What quantised elements stand for: float32 of the same shape, or `out`, to whose type float32 is rounded."""
    check_scales(scales, (quantised.shape[0], 1), "the quantised tensor")
    if out is None:
        return quantised.float() * scales
    for start in range(0, quantised.shape[0], _BAND_ROWS):
        rows = slice(start, start + _BAND_ROWS)
        out[rows] = quantised[rows].float() * scales[rows]
    return out


def report(
    shard: torch.Tensor,
    quantised: torch.Tensor,
    scales: torch.Tensor,
    *,
    at: tuple[int, int] = (0, 0),  # noqa: ARG001 - as for `magnitudes`
) -> QuantisationReport:
    """The error of `quantised` against `shard`."""
    total = QuantisationReport()
    for start in range(0, shard.shape[0], _BAND_ROWS):
        rows = slice(start, start + _BAND_ROWS)
        total += QuantisationReport.of(shard[rows].float(), dequantise(quantised[rows], scales[rows]))
    return total
