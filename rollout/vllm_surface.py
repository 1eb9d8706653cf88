"""The surface of vLLM that weightlane uses: the internals that it imports, by name, and how it calls them.

vLLM promises none of them. A release that lacks one, or that wants other arguments, is refused before a replica serves, by an
error with the name; vLLM itself starts as if weightlane were not installed. Modules import these names inside functions:
importing vLLM takes seconds.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import inspect
import logging
import re
from operator import attrgetter
from typing import Any

from weightlane.ckpt_engines import ConfigError

BACKEND = "weightlane"
"""The name of weightlane's weight-transfer engine in vLLM's configuration."""
TRIED = ((0, 28), (0, 34))
"""The first release of vLLM that was tried, and the first after the last one: docs/reference/vllm-versions.md."""

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
    "vllm.v1.engine.core": ("EngineCore", "EngineCoreProc"),
    # Completions.
    "vllm.outputs": ("CompletionOutput",),
    # The start of a worker, whose errors vLLM keeps in the log.
    "vllm.v1.worker.worker_base": ("WorkerWrapperBase",),
    # What a worker does between two decode steps.
    "vllm.v1.worker.gpu_worker": ("Worker",),
    # Adapters without files, models that can have some, and the names of tensors in a checkpoint and in a model.
    "vllm.model_executor.models": ("supports_lora",),
    "vllm.model_executor.models.utils": ("WeightsMapper",),
    "vllm.lora.lora_model": ("LoRAModel",),
    "vllm.lora.model_manager": ("LoRAModelManager",),
    "vllm.lora.peft_helper": ("PEFTHelper",),
    "vllm.v1.worker.lora_model_runner_mixin": ("LoRAModelRunnerMixin",),
    # Layers that are treated specially.
    "vllm.model_executor.layers.attention": ("is_deferred_attention_layer",),
    "vllm.model_executor.layers.fused_moe": ("RoutedExperts",),
}
_ON_CPU = {
    # Replaced, so that workers sleep, layers compute from their parameters, and tokens without an adapter without one.
    "vllm.platforms.cpu": ("CpuPlatform",),
    "vllm.v1.worker.cpu_worker": ("CPUWorker",),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum",),
    "vllm.lora.punica_wrapper.punica_cpu": ("PunicaWrapperCPU",),
    "vllm.model_executor.layers.rotary_embedding": ("RotaryEmbedding",),
    "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe": ("CPUUnquantizedExperts", "is_zentorch_moe_supported"),
}
_WITHOUT_WEIGHT_VERSIONS = {
    # Replaced where completions do not say their weight versions: before 0.32.
    "vllm.v1.engine.output_processor": ("OutputProcessor", "RequestState"),
}
_CALLS: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    ("BaseModelLoader.load_model", 1, ("vllm_config", "model_config")),
    ("EngineCore.collective_rpc", 2, ("timeout", "args", "kwargs")),
    ("EngineCore.is_scheduler_paused", 1, ()),
    ("EngineCore.pause_scheduler", 1, ("mode", "clear_cache")),
    ("EngineCore.reset_encoder_cache", 1, ()),
    ("EngineCore.reset_prefix_cache", 1, ("reset_running_requests", "reset_connector")),
    ("EngineCore.resume_scheduler", 1, ()),
    ("EngineCore.set_weight_version", 2, ()),
    ("EngineCore.sleep", 3, ()),
    ("EngineCore.wake_up", 2, ()),
    ("LoRAModel.from_lora_tensors", 3, ("device", "dtype", "weights_mapper")),
    ("LoRAModelManager.activate_adapter", 2, ()),
    ("LoRAModelManager.add_adapter", 2, ()),
    ("LoRAModelManager.list_adapters", 1, ()),
    ("LoRAModelManager.remove_adapter", 2, ()),
    ("LoRAModelRunnerMixin.load_lora_model", 4, ()),
    ("PEFTHelper", 0, ("r", "lora_alpha", "target_modules")),
    ("PEFTHelper.validate_legal", 2, ()),
    ("WeightsMapper.apply_list", 2, ()),
    ("Worker.finish_weight_update", 1, ()),
    ("Worker.sleep", 2, ()),
    ("Worker.start_weight_update", 1, ()),
    ("Worker.update_weights", 2, ()),
    ("Worker.wake_up", 2, ()),
    ("WorkerWrapperBase.init_device", 1, ()),
    ("finalize_layerwise_reload", 2, ()),
    ("get_layerwise_info", 1, ()),
    ("initialize_layerwise_reload", 1, ()),
    ("initialize_model", 1, ()),
    ("is_deferred_attention_layer", 1, ()),
    ("process_weights_after_loading", 3, ()),
    ("restore_layer_on_meta", 2, ()),
    ("set_current_vllm_config", 1, ()),
    ("set_default_torch_dtype", 1, ()),
    ("set_forward_context", 2, ("num_tokens", "skip_compiled")),
    ("supports_lora", 1, ()),
)
"""Functions and methods, with the number of positional arguments and the names of the others that they are called with.

The object of a method counts as an argument, the class of a class method does not.
"""
_WHERE = {name: module for module, names in (_MODULES | _ON_CPU | _WITHOUT_WEIGHT_VERSIONS).items() for name in names}

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


def uses_weightlane(vllm_config: Any) -> bool:
    """Whether an engine with this configuration names weightlane's transfer engine; False for None."""
    transfer = None if vllm_config is None else vllm_config.weight_transfer_config
    return transfer is not None and transfer.backend == BACKEND


def check_internals(*, on_cpu: bool) -> None:
    """Raise `ConfigError` for the plugin's first error, or for the first internal that this vLLM does not have.

    Warns once in a process of a release that was not tried and has them all.
    """
    for failure in failures:
        raise ConfigError(
            f"weightlane could not prepare this vLLM{_version()}: {type(failure).__name__}: {failure}",
            part="vllm",
            hint=_HINT,
        ) from failure
    for names in (_MODULES | _ON_CPU if on_cpu else _MODULES).values():
        for name in names:
            __getattr__(name)
    for path, count, keywords in _CALLS:
        _check_call(path, count, keywords)
    _warn_if_untried(_version())


@functools.cache
def _warn_if_untried(version: str) -> None:
    first, after = TRIED
    if (numbers := re.search(r"(\d+)\.(\d+)", version)) and not first <= (int(numbers[1]), int(numbers[2])) < after:
        logging.getLogger(__name__).warning(
            "this vLLM%s was not tried with weightlane. It has all that weightlane uses of it, and is used if the rehearsal of a"
            " first version passes; see the page on vLLM versions in the documentation.",
            version,
        )


def check_attributes(owner: object, path: str, what: str) -> None:
    """Raise `ConfigError` if `owner`, which messages call `what`, has no attribute `path`, such as ``scheduler.requests``."""
    try:
        attrgetter(path)(owner)
    except AttributeError as cause:
        raise ConfigError(
            f"{what} of this vLLM{_version()} has no {path}, which weightlane uses.", part="vllm", hint=_HINT
        ) from cause


def _check_call(path: str, count: int, keywords: tuple[str, ...]) -> None:
    name, _, method = path.partition(".")
    called = __getattr__(name)
    if method:
        check_attributes(called, method, name)
        called = getattr(called, method)
    try:
        inspect.signature(called).bind(*[None] * count, **dict.fromkeys(keywords))
    except TypeError as cause:
        raise ConfigError(
            f"{path} of this vLLM{_version()} cannot be called as weightlane does: {cause}.", part="vllm", hint=_HINT
        ) from cause


def _version() -> str:
    for distribution in importlib.metadata.packages_distributions().get("vllm", ()):
        return f" ({importlib.metadata.version(distribution)})"
    return ""
