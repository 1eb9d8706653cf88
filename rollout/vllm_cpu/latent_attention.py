"""Lets latent attention on vLLM's CPU platform compute from its parameters, also on a CPU with AMX.

There vLLM packs the projection of keys and values for AMX and drops the weight that it was made from. Its own reload fails on the
empty weight, so that no version could be written. Its other backend for latent attention, ``CPU_MLA``, keeps the weight. It also
takes float32, and dimensions that are no multiples of 32.
"""

from __future__ import annotations

from typing import Any

from ..vllm_surface import BACKEND


def keep_latent_attention_live() -> None:
    """Let engines that use weightlane take ``CPU_MLA`` unless they name a backend."""
    from ..vllm_surface import AttentionBackendEnum, CpuPlatform  # noqa: PLC0415 - only in processes that already run vLLM

    original = CpuPlatform.check_and_update_config.__func__

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        transfer, model = vllm_config.weight_transfer_config, vllm_config.model_config
        ours = transfer is not None and transfer.backend == BACKEND
        if ours and model is not None and model.use_mla and vllm_config.attention_config.backend is None:
            vllm_config.attention_config.backend = AttentionBackendEnum.CPU_MLA
        original(cls, vllm_config)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
