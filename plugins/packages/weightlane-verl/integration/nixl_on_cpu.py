"""verl's NIXL engine as `nixl_on_cpu`: where there is no GPU, and with a single rollout worker, which verl 0.9.1 cannot have."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngineRegistry

_zeros = torch.zeros


def _not_pinned(*shape: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
    del pin_memory
    return _zeros(*shape, **options)


sys.modules.setdefault("cupy", ModuleType("cupy"))  # for device memory only
if not torch.cuda.is_available():
    torch.zeros = _not_pinned
    torch.cuda.synchronize = lambda device=None: None

from verl.checkpoint_engine.nixl_checkpoint_engine import NIXLCheckpointEngine  # noqa: E402


@CheckpointEngineRegistry.register("nixl_on_cpu")
class NixlOnCpu(NIXLCheckpointEngine):
    """NIXL without a GPU."""

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[Any]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return verl's topology, without the surplus entries that it has for a single rollout worker."""
        trainers, rollouts = super().build_topology(actor_wg_world_size, rollout_world_size, metadata)
        rollouts["next_agent_metadata"] = rollouts["next_agent_metadata"][-rollout_world_size:]
        return trainers, rollouts
