"""Replacements in layers of vLLM's CPU platform, for engines that use weightlane."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..vllm_surface import uses_weightlane

_LINEAR_NDIM = 2
_BY_HEAD = 3


def built_for_weightlane() -> bool:
    """Whether the engine whose model is built or reloaded in this process uses weightlane.

    vLLM sets its current config while it builds or reloads a model; without a config the answer is no.
    """
    from ..vllm_surface import get_current_vllm_config_or_none  # noqa: PLC0415 - only in processes that already run vLLM

    return uses_weightlane(get_current_vllm_config_or_none())


def keep_linear_parameters_live() -> None:
    """Let linear layers compute from their parameters, as on a GPU, instead of packing them.

    After loading, vLLM on CPU packs each linear weight into a kernel's private format and empties the parameter; for the output
    embedding it keeps both. A copy into the parameter does not change the packed weight.
    """
    from vllm.model_executor.layers import utils  # noqa: PLC0415 - as above

    from ..vllm_surface import dispatch_cpu_unquantized_gemm as original  # noqa: PLC0415 - as above

    def dispatch(layer: Any, remove_weight: bool) -> None:
        # Weights with other dimensions (causal convolutions) have kernels that read the packed format only. vLLM packs
        # them again on each reload, so that they stay correct.
        if built_for_weightlane() and layer.weight.ndim == _LINEAR_NDIM:
            layer.cpu_linear = torch.nn.functional.linear
        else:
            original(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def ask_for_amx() -> None:
    """Let this process use AMX registers if the CPU has them.

    Linux grants them to processes that ask. In most models the first bfloat16 product asks. In a model whose linear layers are
    all fp8 nothing has asked when vLLM's attention uses the registers, and the process would end with SIGILL.
    """
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()


def keep_latent_attention_live() -> None:
    """Let engines that name no backend take ``CPU_MLA`` for latent attention.

    With AMX, vLLM's other backend packs the projection of keys and values and drops the weight that it was made from. Its own
    reload fails on the empty weight, so that no version could be written. ``CPU_MLA`` keeps the weight. It also takes float32,
    and dimensions that are no multiples of 32.
    """
    from ..vllm_surface import AttentionBackendEnum, CpuPlatform  # noqa: PLC0415 - as above

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        model, ours = vllm_config.model_config, uses_weightlane(vllm_config)
        if ours and model is not None and model.use_mla and vllm_config.attention_config.backend is None:
            vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA
        original(cls, vllm_config)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)


def rotate_every_head() -> None:
    """Let vLLM's own torch code rotate queries that have a dimension for heads.

    vLLM 0.32's kernel takes the last dimension of a query for all its heads. Latent attention (DeepSeek-V2, V3) passes views of
    shape [tokens, heads, rotary dim], of which only the first head was rotated, in the wrong place. The model then generates
    other tokens than any other implementation.
    """
    from ..vllm_surface import RotaryEmbedding  # noqa: PLC0415 - as above

    make, kernel = RotaryEmbedding.__init__, RotaryEmbedding.forward_cpu

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.rotates_every_head = built_for_weightlane()

    def forward_cpu(
        self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        rotate = type(self).forward_native if query.ndim >= _BY_HEAD and self.rotates_every_head else kernel
        rotated: tuple[torch.Tensor, torch.Tensor | None] = rotate(self, positions, query, key)
        return rotated

    RotaryEmbedding.__init__, RotaryEmbedding.forward_cpu = init, forward_cpu


def skip_tokens_without_adapter() -> None:
    """Let vLLM leave the layer's outputs of tokens without an adapter as they are, bit for bit.

    vLLM 0.32 marks the tokens of a request without an adapter by the slot -1, and its CPU code indexes the slots with that: as
    soon as another request of the step has an adapter, these tokens are computed with the adapter in the last slot. Its GPU
    kernels skip them.
    """
    from ..vllm_surface import PunicaWrapperCPU  # noqa: PLC0415 - as above

    make, original = PunicaWrapperCPU.__init__, PunicaWrapperCPU._apply_expand

    @functools.wraps(make)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self.skips_tokens_without_adapter = built_for_weightlane()

    def apply_expand(
        self: Any,
        y: torch.Tensor,
        x: torch.Tensor,
        w_t_all: torch.Tensor,
        y_offset: int,
        y_slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        without = self.token_lora_indices < 0
        if self.no_lora or not self.skips_tokens_without_adapter or not without.any():
            original(self, y, x, w_t_all, y_offset, y_slice_size, add_inputs)
            return
        # Not masked by zeros: an adapter of infinities would still turn them into NaN.
        columns = slice(y_offset, y_offset + y_slice_size)
        before = y[without, columns]
        original(self, y, x, w_t_all, y_offset, y_slice_size, add_inputs)
        y[without, columns] = before

    PunicaWrapperCPU.__init__, PunicaWrapperCPU._apply_expand = init, apply_expand
