"""megatron-core's process groups, which are global to a process: engines with one layout share them."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from weightlane.ckpt_engines import ConfigError

from ....config import TrainerConfig
from ..parameter_map import Coordinates

_LOCK = threading.Lock()
"""Guards `_current`: engines may be in several threads of a process."""


@dataclass(slots=True)
class ParallelGroups:
    """The groups of a process, and how many engines use them."""

    layout: dict[str, int]
    """The settings that say which groups there are."""
    default: Any
    """torch's default group when they were made. They end with it, whoever uses them."""
    users: int = 0


_current: ParallelGroups | None = None


def join_parallel_groups(config: TrainerConfig) -> tuple[ParallelGroups, Coordinates]:
    """Make megatron-core's groups, unless other engines of this process use them. Collective.

    Returns the groups, of which each engine must call `leave_parallel_groups`, and this rank's coordinates.

    Raises `ConfigError` if an engine of another layout uses the groups.
    """
    global _current  # noqa: PLW0603 - as the groups are
    chosen = config.megatron
    layout = {
        "tensor_model_parallel_size": chosen.tensor_parallel,
        "context_parallel_size": chosen.context_parallel,
        "pipeline_model_parallel_size": chosen.pipeline_parallel,
        "virtual_pipeline_model_parallel_size": chosen.virtual_pipeline,
        "expert_model_parallel_size": chosen.expert_parallel,
    }
    with _LOCK:
        found = _current
        if found is None or found.default is not dist.group.WORLD:
            _current = None
            _destroy()  # what a failed start has left, or groups of an earlier default group
            found = ParallelGroups(layout, dist.group.WORLD)
            _initialize(layout, config.collective_timeout_s)
            _current = found
        elif found.layout != layout:
            differs = ", ".join(
                f"{name.replace('_model', '').removesuffix('_size')} is {layout[name]}, not {size}"
                for name, size in found.layout.items()
                if layout[name] != size
            )
            raise ConfigError(
                f"another model of the megatron engine is on these ranks, in another layout: {differs}.",
                part="megatron engine",
                hint="Models on the same ranks have one layout. Use the same trainer.megatron, or other ranks.",
            )
        found.users += 1
    return found, Coordinates(
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        chosen.expert_parallel,
    )


def leave_parallel_groups(groups: ParallelGroups) -> None:
    """Note that an engine no longer uses `groups`; the last one destroys them. Never raises."""
    global _current  # noqa: PLW0603 - as above
    with _LOCK:
        groups.users -= 1
        if groups is _current and not groups.users:
            _current = None
            _destroy()


def _initialize(layout: dict[str, int], timeout_s: float) -> None:
    virtual = layout["virtual_pipeline_model_parallel_size"]
    parallel_state.initialize_model_parallel(
        **{**layout, "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None},
        expert_tensor_parallel_size=1,
        distributed_timeout_minutes=timeout_s / 60,
        create_gloo_process_groups=False,
    )


def _destroy() -> None:
    """Destroy the groups and end their threads, which megatron-core's own function leaves running. Never raises."""
    groups: list[Any] = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            with suppress(RuntimeError, ValueError, AssertionError):  # as torch complains when a peer is gone
                dist.destroy_process_group(group)
