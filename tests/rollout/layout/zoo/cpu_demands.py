"""Dimensions that all three paths of vLLM's CPU build take: AVX2, AVX-512 and AMX.

vLLM 0.32 says so in ``amx_mla.py``, ``cpu_moe.py``, ``scaled_mm/cpu.py``, ``layers/utils.py`` and ``gdn_attention.py``, and
by the errors of its kernels, such as "invalid weight input features 16". A tiny model with other dimensions works on some
machines only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_INPUTS, _OUTPUTS = 32, 16
"""``convert_weight_packed`` packs weights for AMX in tiles of so many input and output features."""
_CONVOLUTION = (1, 4)
"""Shape, after the channels, of a convolution that ``causal_conv1d_weight_pack`` packs in bfloat16 (AVX-512 with bfloat16)."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def misfits(config: Any, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Dimensions that a path does not take.

    Args:
        config: The model's transformers config.
        tensors: Its checkpoint; tensors on the meta device suffice.
    """
    found = [
        f"{name} is {getattr(config, name)}" for name, step in _sizes(config).items() if getattr(config, name) % step
    ]
    if getattr(config, "linear_key_head_dim", 0) != getattr(config, "linear_value_head_dim", 0):
        found.append("the heads of linear attention's keys and values differ in size")
    for name, tensor in tensors.items():
        if tuple(tensor.shape[1:]) == _CONVOLUTION and tensor.shape[0] % _INPUTS:
            found.append(f"{name} has {tensor.shape[0]} channels")
        if tensor.dtype.itemsize == 1 and (tensor.shape[1] % _INPUTS or tensor.shape[0] % _OUTPUTS):
            found.append(f"{name}, which is quantised, has shape {tuple(tensor.shape)}")
    return found


def _sizes(config: Any) -> dict[str, int]:
    """The sizes in `config` that a kernel looks at, with the number of which each has to be a multiple."""
    sizes: dict[str, int] = {}
    if getattr(config, "kv_lora_rank", None):  # latent attention: keys and values of each head are packed
        sizes |= {"qk_nope_head_dim": _INPUTS, "kv_lora_rank": _INPUTS, "v_head_dim": _OUTPUTS}
    if any(getattr(config, name, None) for name in _EXPERTS):
        sizes["hidden_size"] = _INPUTS  # experts' hidden units are padded
    if getattr(config, "linear_key_head_dim", None):
        sizes |= {"linear_key_head_dim": _INPUTS, "linear_value_head_dim": _INPUTS}
    return sizes
