"""Names, shapes and configuration under which an inference engine loads quantised tensors as its own checkpoint format."""

from __future__ import annotations

from typing import Any

from .block_fp8 import BLOCK

FP8 = "fp8"
"""Value of `sync.quantise`, and `Manifest.quantised`, of versions in this format."""


def scale_name(weight: str) -> str:
    """Name of the scales: ``a.b.weight`` -> ``a.b.weight_scale_inv``."""
    return f"{weight}_scale_inv"


def scale_shape(weight: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a matrix of shape `weight`."""
    rows, columns = weight
    return -(-rows // BLOCK), -(-columns // BLOCK)


def quantization_config(not_quantised: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a ``config.json``.

    Args:
        not_quantised: Names of linear modules that stay as they are, e.g. ``["lm_head"]``. Activations are quantised dynamically
            in the same format as weights.
    """
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        "modules_to_not_convert": not_quantised,
    }
