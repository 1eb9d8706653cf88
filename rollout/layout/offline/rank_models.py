"""Builds the model of each rank of a replica, one after the other in one process, without loading weights.

Memory for parameters is allocated and never touched, so that it costs nearly nothing on a CPU. The part of a tensor that a rank
owns depends only on the rank's number and the size of its group, and vLLM asks its tensor-parallel and expert groups for both.
Groups of one process that claim to be rank r of n are therefore enough to build rank r's model and to trace its loading.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch

from weightlane.ckpt_engines import WeightlaneError

from ...vllm_surface import BACKEND
from ..loading.checkpoint_expectation import expectation_of
from ..loading.model_errors import model_error
from ..loading.refused_models import refusal_by_vllm, refuse_configuration, refuse_indivisible

_PART = "layout"


def engine_config(
    model: str,
    *,
    tensor_parallel: int,
    dtype: str,
    expert_parallel: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """Configure a replica of `model` as vLLM does, in a process that only builds models. Must be called before vLLM is imported.

    `extra` are further arguments of vLLM's ``EngineArgs``, which override all of these except how processes are run. For the
    other arguments see `layout_report`.

    Raises:
        ConfigError: The checkpoint is broken, or quantised in another format than versions; vLLM does not know the architecture,
            or cannot divide the model between so many ranks.
    """
    # Reading headers is quick, and finds most broken checkpoints.
    expectation_of(model, dtype=torch.float32, tied_embeddings=False)
    quiet_vllm()
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415 - takes seconds
    from vllm.plugins import load_general_plugins  # noqa: PLC0415 - as above

    load_general_plugins()
    try:
        arguments = {
            "dtype": dtype,
            "tensor_parallel_size": tensor_parallel,
            "enable_expert_parallel": expert_parallel,
            **(extra or {}),
            "model": model,
            "distributed_executor_backend": "mp" if tensor_parallel > 1 else None,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
            "kv_cache_memory_bytes": 1 << 20,
            "weight_transfer_config": {"backend": BACKEND},
        }
        config = EngineArgs(**arguments).create_engine_config()
    except Exception as cause:
        action = f"run {model} on {tensor_parallel} ranks"
        hint = "Name a causal language model that vLLM supports."
        raise refusal_by_vllm(cause, action, part=_PART, hint=hint) from cause
    refuse_indivisible(config, part=_PART)
    refuse_configuration(config)
    return config


@contextmanager
def model_of_rank(config: Any, rank: int) -> Iterator[torch.nn.Module]:
    """The model of rank `rank` of `config`, its parameters uninitialised. Inside, vLLM takes this process for that rank.

    Raises:
        ConfigError: The model cannot be built.
    """
    from ...vllm_surface import (  # noqa: PLC0415 - loads vLLM
        initialize_model,
        process_weights_after_loading,
        set_default_torch_dtype,
    )

    device = torch.device(config.device_config.device)
    with as_rank(config, rank):
        try:
            with set_default_torch_dtype(config.model_config.dtype), device:
                model = initialize_model(config)
            process_weights_after_loading(model, config.model_config, device)
        except WeightlaneError:
            raise
        except Exception as cause:
            raise model_error(cause, f"build the model of rank {rank}", part=_PART) from cause
        yield model.eval()


@contextmanager
def as_rank(config: Any, rank: int) -> Iterator[None]:
    """Inside, vLLM takes this process for rank `rank` of `config`."""
    from ...vllm_surface import parallel_state, set_current_vllm_config  # noqa: PLC0415 - slow to import

    _join_group_of_one(config)
    world = config.parallel_config.tensor_parallel_size
    tensor_group, expert_group = parallel_state._TP, parallel_state._EP
    before = config.parallel_config.rank
    with set_current_vllm_config(config):
        parallel_state._TP = _claimed(tensor_group, rank, world)
        # The expert group exists for models with experts; without data parallelism it has the same ranks.
        parallel_state._EP = expert_group and _claimed(expert_group, rank, world)
        config.parallel_config.rank = rank
        try:
            yield
        finally:
            parallel_state._TP, parallel_state._EP = tensor_group, expert_group
            config.parallel_config.rank = before
            # Layers are registered by name, and the next rank's layers have the same names.
            config.compilation_config.static_forward_context.clear()


class _SameOnAllRanks:
    """vLLM's collectives as if every rank had this rank's values: enough to compare a rank's outputs with each other."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world

    def all_reduce(self, values: torch.Tensor) -> torch.Tensor:
        return values.clone()

    def all_gather(self, values: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return torch.cat([values] * self._world, dim)

    def gather(self, values: torch.Tensor, dst: int = 0, dim: int = -1) -> torch.Tensor | None:
        return self.all_gather(values, dim) if dst == self._rank else None

    def reduce_scatter(self, values: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return values.chunk(self._world, dim)[self._rank].clone()


def _claimed(group: Any, rank: int, world: int) -> Any:
    """A copy of `group`, which has one process, that claims to be rank `rank` of `world`."""
    claimed = copy.copy(group)
    claimed.world_size, claimed.rank_in_group, claimed.ranks = world, rank, list(range(world))
    if world > 1:
        # Some models ask the process group for its size. No collective of torch may run on it.
        claimed.device_group = SimpleNamespace(size=lambda: world, rank=lambda: rank)
        claimed.device_communicator, claimed.use_custom_op_call = _SameOnAllRanks(rank, world), False
    return claimed


def _join_group_of_one(config: Any) -> None:
    from ...vllm_surface import parallel_state, set_current_vllm_config  # noqa: PLC0415 - slow to import

    with set_current_vllm_config(config):
        if parallel_state.model_parallel_is_initialized():
            # The groups depend on the model: only some models have experts.
            parallel_state.destroy_model_parallel()
        else:
            # No other process joins this group, so that it needs neither a port nor a file.
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)


def quiet_vllm() -> None:
    """Prepare this process for a vLLM that only builds models. Must be called before anything imports vLLM."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None  # Loading calls it; vLLM's CPU worker does the same.
