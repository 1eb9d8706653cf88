"""megatron-core's process groups, which are global to the process."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from ...config import TrainerConfig
from .checkpoint_names import Coordinates


def join_parallel_groups(config: TrainerConfig) -> tuple[list[Any] | None, Coordinates]:
    """Make the groups, replacing those of an earlier engine. Returns them and this rank's coordinates. Collective."""
    layout = config.megatron
    destroy_parallel_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=config.collective_timeout_s / 60,
        create_gloo_process_groups=False,
    )
    return parallel_groups(), Coordinates(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        layout.expert_parallel,
    )


def parallel_groups() -> list[Any] | None:
    """Return the process groups that megatron-core has made; None if there are none."""
    groups: list[Any] | None = parallel_state._global_process_group_list
    return groups


def destroy_parallel_groups() -> None:
    """Destroy the groups and end their threads, which megatron-core's own function leaves running. Never raises."""
    groups = parallel_groups() or []
    parallel_state.destroy_model_parallel()
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            with suppress(RuntimeError, ValueError, AssertionError):  # as torch complains when a peer is gone
                dist.destroy_process_group(group)
