"""The surface of vLLM that weightlane uses: the internals that it imports, by name, checked before a replica serves.

Attributes and methods that it reads of them are not listed here. vLLM promises none of them. A release that lacks one is
refused before a replica serves, by an error with the missing name; vLLM itself starts as if weightlane were not installed.
Modules import these names inside functions: importing vLLM takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from weightlane.ckpt_engines import ConfigError

BACKEND = "weightlane"
"""The name of weightlane's weight-transfer engine in vLLM's configuration."""

_MODULES = {
    # Reloads of a live model, layer by layer.
    "vllm.model_executor.model_loader.reload": (
        "finalize_layerwise_reload",
        "initialize_layerwise_reload",
    ),
    "vllm.model_executor.model_loader.reload.layerwise": ("get_layerwise_info",),
    "vllm.model_executor.model_loader.reload.meta": ("restore_layer_on_meta",),
    # A second model next to the one that serves, and its outputs.
    "vllm.config": ("get_current_vllm_config_or_none", "set_current_vllm_config"),
    "vllm.distributed": ("parallel_state",),
    "vllm.distributed.parallel_state": ("get_tp_group",),
    "vllm.forward_context": ("set_forward_context",),
    "vllm.model_executor.model_loader.base_loader": ("BaseModelLoader",),
    "vllm.model_executor.model_loader.utils": ("initialize_model", "process_weights_after_loading"),
    "vllm.utils.torch_utils": ("set_default_torch_dtype",),
    # What a pooling model is served for.
    "vllm.pooling_params": ("PoolingParams",),
    "vllm.v1.pool.metadata": ("PoolingMetadata", "PoolingStates"),
    # The process that schedules decode steps, and the message that wakes it.
    "vllm.v1.engine": ("EngineCoreRequestType",),
    "vllm.v1.engine.core": ("EngineCore",),
    # The start of a worker, whose errors vLLM keeps in the log.
    "vllm.v1.worker.worker_base": ("WorkerWrapperBase",),
    # Adapters without files, and models that can have some.
    "vllm.model_executor.models": ("supports_lora",),
    "vllm.lora.lora_model": ("LoRAModel",),
    "vllm.lora.peft_helper": ("PEFTHelper",),
    "vllm.v1.worker.lora_model_runner_mixin": ("LoRAModelRunnerMixin",),
    # Layers that are treated specially.
    "vllm.model_executor.layers.attention": ("is_deferred_attention_layer",),
    "vllm.model_executor.layers.fused_moe": ("RoutedExperts",),
}
_ON_CPU = {
    # Replaced, so that layers compute from their parameters, and tokens without an adapter without one.
    "vllm.platforms.cpu": ("CpuPlatform",),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum",),
    "vllm.lora.punica_wrapper.punica_cpu": ("PunicaWrapperCPU",),
    "vllm.model_executor.layers.rotary_embedding": ("RotaryEmbedding",),
    "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe": ("CPUUnquantizedExperts", "is_zentorch_moe_supported"),
}
_WHERE = {name: module for module, names in (_MODULES | _ON_CPU).items() for name in names}

_HINT = "Install a vLLM that was tried: see the extra `vllm` of weightlane."
failures: list[Exception] = []
"""Errors of `weightlane.rollout.vllm.plugin` in this process."""


def __getattr__(name: str) -> Any:
    """Import one of vLLM's internals. Raises a `ConfigError` with its name if this vLLM does not have it."""
    module = _WHERE.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as cause:
        raise ConfigError(
            f"this vLLM{_version()} has no {module}.{name}, which weightlane uses.",
            part="vllm",
            hint=_HINT,
        ) from cause


def check_internals(*, on_cpu: bool) -> None:
    """Raise `ConfigError` for the plugin's first error, or for the first internal that this vLLM does not have."""
    for failure in failures:
        raise ConfigError(
            f"weightlane could not prepare this vLLM{_version()}: {type(failure).__name__}: {failure}",
            part="vllm",
            hint=_HINT,
        ) from failure
    for names in (_MODULES | _ON_CPU if on_cpu else _MODULES).values():
        for name in names:
            __getattr__(name)


def _version() -> str:
    for distribution in importlib.metadata.packages_distributions().get("vllm", ()):
        return f" ({importlib.metadata.version(distribution)})"
    return ""
