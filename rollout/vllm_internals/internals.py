"""Every inside of vLLM that weightlane uses, in one place.

vLLM promises none of them: a release that lacks one is refused, and the missing one named, before a replica serves; vLLM itself
starts as if weightlane were not installed. Import them from here, inside functions: importing vLLM takes seconds.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any

from weightlane.ckpt_engines import ConfigError

_MODULES = {
    # Loading again what is loaded already, layer by layer.
    "vllm.model_executor.model_loader.reload": (
        "finalize_layerwise_reload",
        "initialize_layerwise_reload",
    ),
    "vllm.model_executor.model_loader.reload.layerwise": ("get_layerwise_info",),
    "vllm.model_executor.model_loader.reload.meta": ("restore_layer_on_meta",),
    # Making a model beside the one that serves, and asking it for an output.
    "vllm.config": ("get_current_vllm_config_or_none", "set_current_vllm_config"),
    "vllm.distributed": ("parallel_state",),
    "vllm.distributed.parallel_state": ("get_tp_group",),
    "vllm.forward_context": ("set_forward_context",),
    "vllm.model_executor.model_loader.base_loader": ("BaseModelLoader",),
    "vllm.model_executor.model_loader.utils": ("initialize_model", "process_weights_after_loading"),
    "vllm.utils.torch_utils": ("set_default_torch_dtype",),
    # Where decode steps are scheduled, and what wakes it.
    "vllm.v1.engine": ("EngineCoreRequestType",),
    "vllm.v1.engine.core": ("EngineCore",),
    # Layers that need to be known.
    "vllm.model_executor.layers.attention": ("is_deferred_attention_layer",),
    "vllm.model_executor.layers.fused_moe": ("RoutedExperts",),
}
_ON_CPU = {
    # What is replaced, so that parameters are what is computed from.
    "vllm.model_executor.layers.rotary_embedding": ("RotaryEmbedding",),
    "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe": ("CPUUnquantizedExperts", "is_zentorch_moe_supported"),
}
_WHERE = {name: module for module, names in (_MODULES | _ON_CPU).items() for name in names}

_HINT = "Install a vLLM that was tried: see the extra `vllm` of weightlane."
failures: list[Exception] = []
"""Why `weightlane.rollout.vllm.plugin` could not do in this process what it does."""


def __getattr__(name: str) -> Any:
    """One of vLLM's insides, looked up now. Raises `ConfigError` naming it when this vLLM does not have it."""
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
    """Raise `ConfigError` for the first thing that is not there, or that could not be done when vLLM started."""
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
