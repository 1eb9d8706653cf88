"""Models as each rank of a replica would build them, one after the other in one process, with no weights loaded.

Memory for parameters is asked for and never touched, so that it costs next to none on a CPU. Which part of a tensor a rank owns
depends on nothing but its number and the size of its group, and vLLM asks its groups for both (that of tensor parallelism, and
that of experts): groups of one that claim to be rank r of n are enough to build rank r's model and to trace its loading, and no
process has to wait for another.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError

from ...vllm_internals.cpu_linear import BACKEND
from ..loading.topology import in_short, refuse_division, why_not

_PART = "layout"


def engine_config(
    model: str,
    *,
    tensor_parallel: int,
    dtype: str,
    expert_parallel: bool = False,
    extra: Mapping[str, Any] | None = None,
) -> Any:
    """Configure a replica of `model` as vLLM does.

    Args:
        model: Checkpoint directory, or the name of a model whose files are on this machine.
        tensor_parallel: Ranks of the replica.
        dtype: Data type to compute in; ``auto`` takes the checkpoint's.
        expert_parallel: Whether experts are divided between the ranks by number.
        extra: Further arguments of vLLM's ``EngineArgs``, which win over these; not over how processes are run.

    Raises:
        ConfigError: vLLM does not know the architecture, or cannot divide it between so many ranks.
    """
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
    except (ValueError, TypeError, OSError, RuntimeError, KeyError, AttributeError) as cause:
        raise ConfigError(
            f"vLLM cannot run {model} on {tensor_parallel} ranks: {in_short(cause)}",
            part=_PART,
            hint=why_not(cause) or "Name a causal language model that vLLM supports.",
        ) from cause
    refuse_division(config, part=_PART)
    return config


@contextmanager
def model_of_rank(config: Any, rank: int) -> Iterator[torch.nn.Module]:
    """The model that rank `rank` of `config` computes with, its parameters uninitialised; inside, vLLM takes us for that rank.

    Raises:
        ConfigError: The model cannot be built.
    """
    from ...vllm_internals.internals import (  # noqa: PLC0415 - loads vLLM
        initialize_model,
        process_weights_after_loading,
        set_default_torch_dtype,
    )

    device = torch.device(config.device_config.device)
    with as_rank(config, rank):
        with set_default_torch_dtype(config.model_config.dtype), device:
            model = initialize_model(config)
        process_weights_after_loading(model, config.model_config, device)
        yield model.eval()


@contextmanager
def as_rank(config: Any, rank: int) -> Iterator[None]:
    """Inside, vLLM takes us for rank `rank` of `config`.

    Raises:
        ConfigError: A model cannot be built inside.
    """
    from ...vllm_internals.internals import parallel_state, set_current_vllm_config  # noqa: PLC0415 - slow to import

    _join_group_of_one(config)
    world = config.parallel_config.tensor_parallel_size
    real, real_experts = parallel_state._TP, parallel_state._EP
    before = config.parallel_config.rank
    with set_current_vllm_config(config):
        parallel_state._TP = _claimed(real, rank, world)
        # Made for every model with experts; without data-parallel replicas it has the ranks of the other.
        parallel_state._EP = real_experts and _claimed(real_experts, rank, world)
        config.parallel_config.rank = rank
        try:
            yield
        except (ValueError, AssertionError, NotImplementedError, ImportError) as cause:
            raise ConfigError(f"vLLM cannot build the model of rank {rank}: {in_short(cause)}", part=_PART) from cause
        finally:
            parallel_state._TP, parallel_state._EP = real, real_experts
            config.parallel_config.rank = before
            # Layers are registered by name, and the next rank's have the same.
            config.compilation_config.static_forward_context.clear()


class _ClaimedProcesses:
    """A process group that says to be of another size; no collective of torch's may run on it."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank = rank
        self._world = world

    def size(self) -> int:
        return self._world

    def rank(self) -> int:
        return self._rank


class _Alike:
    """vLLM's collectives where every other rank has what this one has: enough to compare what one rank computes with itself."""

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
    """`group`, of this process alone, as rank `rank` of `world` would see it."""
    claimed = copy.copy(group)
    claimed.world_size, claimed.rank_in_group, claimed.ranks = world, rank, list(range(world))
    if world > 1:
        # Some models ask the processes themselves how many they are.
        claimed.device_group = _ClaimedProcesses(rank, world)
        claimed.device_communicator, claimed.use_custom_op_call = _Alike(rank, world), False
    return claimed


def _join_group_of_one(config: Any) -> None:
    from ...vllm_internals.internals import parallel_state, set_current_vllm_config  # noqa: PLC0415 - slow to import

    with set_current_vllm_config(config):
        if parallel_state.model_parallel_is_initialized():
            # Which groups there are depends on the model: only some have experts.
            parallel_state.destroy_model_parallel()
        else:
            # Nobody else is to find this group, so that it needs neither a port nor a file.
            torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)


def quiet_vllm() -> None:
    """Set up this process's environment for a vLLM that only builds models; call it before anything imports vLLM."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None  # loading calls it; vLLM's CPU worker does the same
