"""Process environment and engine arguments of a replica's vLLM."""

from __future__ import annotations

import dataclasses
import difflib
import os
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError, WeightlaneError

from ..config import GPU_SHARE, RolloutConfig
from ..layout.loading.adapter_tensors import MERGED, engine_arguments_of
from ..layout.loading.refused_arguments import refuse_arguments
from ..layout.loading.refused_models import (
    refusal_by_vllm,
    refuse_configuration,
    refuse_in_place,
    refuse_indivisible,
    refuse_other_versions,
)
from ..vllm_surface import BACKEND
from .watchdog import WATCH_ENV

_PART = "rollout"
_CPU_KV_CACHE_BYTES = 256 << 20
"""Default size of the KV cache on CPU, where vLLM cannot profile memory; see `RolloutConfig.kv_cache_memory_bytes`."""


def child_environment(config: RolloutConfig) -> dict[str, str]:
    """The environment variables of a replica's processes; all that are set already but OMP_NUM_THREADS keep their values."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # A forked child would inherit the locks of this process's threads, and Ray's.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        # On CPU only: trainer ranks share the cores, and pinning would put both on the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    variables = {name: os.environ.get(name, value) for name, value in defaults.items()}
    return variables | {"OMP_NUM_THREADS": str(config.threads_per_rank)}


def prepare_environment(config: RolloutConfig) -> bool:
    """Set the variables of `child_environment` in this process, and let its vLLM children end with it.

    Must be called before anything imports vLLM. Returns whether vLLM's platform here is the CPU.
    """
    os.environ.update(child_environment(config) | {WATCH_ENV: str(os.getpid())})
    from vllm.platforms import current_platform  # noqa: PLC0415 - vLLM reads the environment when imported

    return bool(current_platform.is_cpu())


def replica_config(config: RolloutConfig, model_dir: Path) -> tuple[Any, Any]:
    """Arguments of one replica, vLLM's ``AsyncEngineArgs``, and the configuration that vLLM makes of them. Loads no weights.

    Raises:
        ConfigError: vLLM refuses the model or an argument, or the replica could take no versions or return no experts.
    """
    refuse_arguments(config, model_dir)
    on_cpu = prepare_environment(config)
    if on_cpu and config.routed_experts:
        raise ConfigError(
            "vLLM returns the experts of tokens on GPUs only: its CPU build lacks Triton, which its Model Runner V2 needs.",
            part=_PART,
            hint='Set algorithm.router_replay to false, or rollout.engine to "transformers" for a small model.',
        )
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415 - after the environment
    from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415

    from ..vllm_surface import supports_lora  # noqa: PLC0415

    named = engine_arguments(config, model_dir, on_cpu=on_cpu)
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name in config.extra_engine_args:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ConfigError(
                f"vLLM has no argument {name!r}, which rollout.extra_engine_args names.",
                part=_PART,
                hint=f"Did you mean {near[0]!r}?" if near else "See the fields of its AsyncEngineArgs.",
            )
    try:
        arguments = AsyncEngineArgs(**named)
        found = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
        model = found.model_config
        served = None
        if config.adapter is not None:
            served, _ = model.registry.resolve_model_cls(model.architectures, model)
    except WeightlaneError:
        raise
    except Exception as cause:
        raise refusal_by_vllm(cause, f"start from {model_dir}", part=_PART) from cause
    if model.runner_type != "generate":  # which vLLM chooses for a model that it only knows as one for embeddings
        raise ConfigError(
            f"vLLM does not generate with {', '.join(model.architectures)}.",
            part=_PART,
            hint="model.path is a directory with a causal language model in Hugging Face format.",
        )
    if served is not None and not supports_lora(served):
        raise ConfigError(
            f"vLLM has no adapters for {served.__name__}, and versions are adapters.", part=_PART, hint=MERGED
        )
    refuse_indivisible(found, part=_PART)
    refuse_configuration(found)
    refuse_other_versions(found, adapter=config.adapter is not None)
    if config.commit == "in_place":
        refuse_in_place(model)
    return arguments, found


def engine_arguments(config: RolloutConfig, model_dir: Path, *, on_cpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's ``AsyncEngineArgs`` for one replica.

    Raises `ConfigError` for an adapter that the model cannot be served with.
    """
    arguments: dict[str, Any] = {
        "model": str(model_dir),
        "dtype": config.dtype,
        "tensor_parallel_size": config.tensor_parallel,
        "enable_expert_parallel": config.expert_parallel,
        "max_model_len": config.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "gpu_memory_utilization": config.gpu_memory_utilization or GPU_SHARE,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes or (_CPU_KV_CACHE_BYTES if on_cpu else None),
        "enforce_eager": on_cpu if config.enforce_eager is None else config.enforce_eager,
        # Prompts and completions are token ids.
        "skip_tokenizer_init": True,
        # A policy gradient needs the distribution that a token was drawn from; "raw" ignores the temperature.
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": BACKEND},
        "disable_log_stats": True,
        "seed": 0,
    }
    if config.routed_experts:
        arguments["enable_return_routed_experts"] = True
    if config.sleeps and not on_cpu:
        arguments["enable_sleep_mode"] = True
    if config.tensor_parallel > 1:
        # Inside a Ray actor vLLM would start Ray workers of its own.
        arguments["distributed_executor_backend"] = "mp"
    if config.adapter is not None:
        arguments |= engine_arguments_of(model_dir, config.adapter, config.adapter_slots)
    return arguments | config.extra_engine_args
