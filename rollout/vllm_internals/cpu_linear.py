"""Keeps the weights of linear layers alive on vLLM's CPU platform.

After loading, vLLM on CPU packs each linear weight into a kernel's private format and empties the parameter; for the output
embedding it keeps both. Packed copies follow neither a copy into the parameter nor a checksum over it. With the function below
in place a linear layer computes straight from its parameter, as it does on a GPU, so that the parameters are the weights.
"""

from __future__ import annotations

from typing import Any

import torch

BACKEND = "weightlane"
_PATCHED = "_weightlane_original"
_LINEAR_NDIM = 2


def keep_linear_parameters_live() -> None:
    """Replace vLLM's packing of CPU linear layers; calling it again does nothing.

    The replacement asks the current vLLM config on each call and packs as before for an engine that does not use weightlane.
    """
    from vllm.model_executor.layers import utils  # noqa: PLC0415 - only in processes that already run vLLM

    from .internals import dispatch_cpu_unquantized_gemm  # noqa: PLC0415 - as above

    if hasattr(dispatch_cpu_unquantized_gemm, _PATCHED):
        return
    original = dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:
        # Other ranks of weights (causal convolutions) have kernels that read the packed format only; vLLM packs them again
        # on each reload, so they stay correct.
        if uses_weightlane() and layer.weight.ndim == _LINEAR_NDIM:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            original(layer, remove_weight)

    setattr(dispatch, _PATCHED, original)
    utils.dispatch_cpu_unquantized_gemm = dispatch


def uses_weightlane() -> bool:
    """Whether the engine whose model is being built or reloaded in this process takes its weights from weightlane.

    vLLM sets its current config around both; where there is none the answer is no.
    """
    from .internals import get_current_vllm_config_or_none  # noqa: PLC0415 - as above

    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def ask_for_amx() -> None:
    """Let this process use AMX registers, where the CPU has them.

    Linux gives them to processes that ask. In most models the first bfloat16 product does; in one whose linear layers are all
    fp8 nothing has, when vLLM's attention uses them, and the process would end with SIGILL.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
