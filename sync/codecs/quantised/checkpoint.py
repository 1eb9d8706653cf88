"""Names and configuration under which an inference engine loads quantised tensors as its own checkpoint format."""

from __future__ import annotations

from typing import Any, Literal

import torch

from . import block_fp8

Scheme = Literal["fp8", "int8"]
DTYPES: dict[Scheme, torch.dtype] = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
"""What elements become."""


def scale_name(weight: str, scheme: Scheme) -> str:
    """``a.b.weight`` -> ``a.b.weight_scale_inv`` for fp8, ``a.b.weight_scale`` for int8."""
    return f"{weight}_scale_inv" if scheme == "fp8" else f"{weight}_scale"


def scale_shape(weight: tuple[int, int], scheme: Scheme) -> tuple[int, int]:
    """Shape of the scales of a matrix of shape `weight`."""
    rows, columns = weight
    return (-(-rows // block_fp8.BLOCK), -(-columns // block_fp8.BLOCK)) if scheme == "fp8" else (rows, 1)


def quantization_config(scheme: Scheme, not_quantised: list[str]) -> dict[str, Any]:
    """What ``config.json`` holds as ``quantization_config``.

    Args:
        scheme: How the weights of linear layers are quantised; activations are, dynamically, alike.
        not_quantised: Names of linear modules that are left as they are, e.g. ``["lm_head"]``.
    """
    if scheme == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [block_fp8.BLOCK, block_fp8.BLOCK],
            "modules_to_not_convert": not_quantised,
        }
    eight_bits = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": not_quantised,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**eight_bits, "strategy": "channel", "dynamic": False},
                "input_activations": {**eight_bits, "strategy": "token", "dynamic": True},
            }
        },
    }
