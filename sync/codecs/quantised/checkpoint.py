"""Names, shapes and configuration under which an inference engine loads quantised tensors as its own checkpoint format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch

from .block_fp8 import BLOCK, BlockFp8
from .channel_int8 import ChannelInt8
from .quantiser import Quantiser

Scheme = Literal["fp8", "int8"]
QUANTISERS: Mapping[Scheme, Quantiser] = {"fp8": BlockFp8(), "int8": ChannelInt8()}
DTYPES: Mapping[Scheme, torch.dtype] = {scheme: quantiser.dtype for scheme, quantiser in QUANTISERS.items()}
"""Dtypes of quantised elements."""


def scale_name(weight: str, scheme: Scheme) -> str:
    """Name of the scales: ``a.b.weight`` -> ``a.b.weight_scale_inv`` for fp8, ``a.b.weight_scale`` for int8."""
    return f"{weight}_scale_inv" if scheme == "fp8" else f"{weight}_scale"


def scale_shape(weight: tuple[int, int], scheme: Scheme) -> tuple[int, int]:
    """Shape of the scales of a matrix of shape `weight`."""
    rows, columns = weight
    return (-(-rows // BLOCK), -(-columns // BLOCK)) if scheme == "fp8" else (rows, 1)


def quantization_config(scheme: Scheme, not_quantised: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of a ``config.json``.

    Args:
        scheme: Format of the weights of linear layers. Activations are quantised dynamically in the same format.
        not_quantised: Names of linear modules that stay as they are, e.g. ``["lm_head"]``.
    """
    if scheme == "fp8":
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
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
