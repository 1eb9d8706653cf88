"""Quantising written down once more, block after block and row after row, without anything of the package."""

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


def reference_int8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Elements and scales, row after row, in float32."""
    scales = torch.empty(matrix.shape[0], 1)
    quantised = torch.empty(matrix.shape, dtype=torch.int8)
    for i, row in enumerate(matrix.to(torch.float32)):
        largest = row.abs().max() if row.numel() else torch.tensor(0.0)
        scale = torch.tensor(1.0) if largest == 0 else torch.maximum(largest / 127.5, torch.tensor(2.0**-126))
        scales[i, 0] = scale
        quantised[i] = torch.clamp(torch.round(row / scale), -128, 127).to(torch.int8)
    return quantised, scales


REFERENCES = {"fp8": reference_fp8, "int8": reference_int8}


def restored(matrix: torch.Tensor, scheme: str) -> torch.Tensor:
    """Quantise a matrix and restore it to float32."""
    if scheme == "int8":
        quantised, scales = reference_int8(matrix)
        return quantised.float() * scales
    quantised, scales = reference_fp8(matrix)
    wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: matrix.shape[0], : matrix.shape[1]]
    return quantised.float() * wide


def left_of(tensors: dict[str, torch.Tensor], scheme: str) -> dict[str, torch.Tensor]:
    """Return the weights that an unquantised rollout must hold: linear layers quantised and restored, all others unchanged."""
    return {
        name: restored(tensor, scheme) if name in ("q.weight", "o.weight", "up.weight", "down.weight") else tensor
        for name, tensor in tensors.items()
    }
