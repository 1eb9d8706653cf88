"""Lets linear layers on vLLM's CPU platform compute from their parameters, as on a GPU.

After loading, vLLM on CPU packs each linear weight into a kernel's private format and empties the parameter; for the output
embedding it keeps both. A copy into the parameter does not change the packed weight. `keep_linear_parameters_live` prevents the
packing.
"""

from __future__ import annotations

from typing import Any

import torch

_LINEAR_NDIM = 2


def keep_linear_parameters_live() -> None:
    """Replace vLLM's packing of CPU linear layers.

    The replacement checks the current vLLM config on each call, and packs as before for an engine that does not use weightlane.
    """
    from vllm.model_executor.layers import utils  # noqa: PLC0415 - only in processes that already run vLLM

    from ..vllm_surface import dispatch_cpu_unquantized_gemm as original  # noqa: PLC0415 - as above

    def dispatch(layer: Any, remove_weight: bool) -> None:
        # Weights with other dimensions (causal convolutions) have kernels that read the packed format only. vLLM packs
        # them again on each reload, so that they stay correct.
        if uses_weightlane() and layer.weight.ndim == _LINEAR_NDIM:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            original(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def uses_weightlane() -> bool:
    """Whether the engine whose model is built or reloaded in this process uses weightlane.

    vLLM sets its current config while it builds or reloads a model; without a config the answer is no.
    """
    from ..vllm_surface import BACKEND, get_current_vllm_config_or_none  # noqa: PLC0415 - as above

    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def ask_for_amx() -> None:
    """Let this process use AMX registers if the CPU has them.

    Linux grants them to processes that ask. In most models the first bfloat16 product asks. In a model whose linear layers are
    all fp8 nothing has asked when vLLM's attention uses the registers, and the process would end with SIGILL.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
