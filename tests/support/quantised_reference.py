"""Quantising written down once more, block after block, without anything of the package."""

from __future__ import annotations

import itertools

import torch


def reference_fp8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scales, block after block, in float32."""
    rows, columns = matrix.shape
    scales = torch.empty(-(-rows // 128), -(-columns // 128))
    quantised = torch.empty(rows, columns, dtype=torch.float8_e4m3fn)
    for i, j in itertools.product(range(scales.shape[0]), range(scales.shape[1])):
        block = matrix[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].to(torch.float32)
        largest = block.abs().max()
        scale = torch.tensor(1.0) if largest == 0 else torch.maximum(largest / 448, torch.tensor(2.0**-126))
        scales[i, j] = scale
        quantised[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] = torch.clamp(block / scale, -448, 448).to(
            torch.float8_e4m3fn
        )
    return quantised, scales


def restored(matrix: torch.Tensor) -> torch.Tensor:
    """Quantise a matrix and restore it to float32."""
    quantised, scales = reference_fp8(matrix)
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: matrix.shape[0], : matrix.shape[1]]
    return quantised.float() * wide


def left_of(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the weights that an unquantised rollout must hold: linear layers quantised and restored, all others unchanged."""
    return {
        name: restored(tensor) if name in ("q.weight", "o.weight", "up.weight", "down.weight") else tensor
        for name, tensor in tensors.items()
    }
