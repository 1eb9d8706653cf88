"""What all quantisers refuse, and in which words."""

from __future__ import annotations

import torch

from weightlane.ckpt_engines import ConfigError, ManifestError

PART = "quantiser"
_SOURCES = (torch.float32, torch.bfloat16, torch.float16)


def check_shard(shard: torch.Tensor, name: str) -> None:
    """`ConfigError` unless `shard` is a matrix of floats."""
    if shard.dim() != 2 or shard.dtype not in _SOURCES:  # noqa: PLR2004 - a matrix
        raise ConfigError(
            f"{name} has shape {tuple(shard.shape)} and dtype {shard.dtype}.",
            part=PART,
            hint="Matrices of float32, bfloat16 or float16 are quantised; send everything else as it is.",
        )


def check_finite(amax: torch.Tensor, name: str) -> None:
    """`ManifestError` if a tensor with such largest magnitudes holds an inf or NaN."""
    if not torch.isfinite(amax).all():
        raise ManifestError(
            f"{name} holds inf or NaN, which no scale can represent.",
            part=PART,
            hint="The training has diverged, or send this tensor as it is.",
        )


def check_scales(scales: torch.Tensor, shape: tuple[int, int], name: str) -> None:
    """`ConfigError` unless there is one float32 scale for each block."""
    if tuple(scales.shape) != shape or scales.dtype != torch.float32:
        raise ConfigError(
            f"{name} needs float32 scales of shape {shape}, there are {scales.dtype} of {tuple(scales.shape)}.",
            part=PART,
            hint="Pass what scales_of made of the exchanged magnitudes of the same blocks.",
        )


def scales_from(amax: torch.Tensor, steps: float) -> torch.Tensor:
    """``amax / steps`` in float32; 1 where all is zero, and never below the smallest normal number."""
    scales = (amax / steps).clamp_min(torch.finfo(torch.float32).tiny)
    return torch.where(amax == 0, torch.ones_like(scales), scales)
