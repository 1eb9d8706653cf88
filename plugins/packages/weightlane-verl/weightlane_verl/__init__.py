"""The checkpoint engine `weightlane` for verl: weights go over any checkpoint engine of weightlane's registry.

verl imports this module on every process when its configuration names it, and the import registers the engine:

    actor_rollout_ref.rollout.checkpoint_engine.backend=weightlane
    actor_rollout_ref.rollout.checkpoint_engine.custom_backend_module=weightlane_verl
    +actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.weightlane.engine=shm

Every argument of `WeightlaneCheckpointEngine` except `bucket_size` and `is_master`, which verl gives, is a key of
``engine_kwargs.weightlane``.
"""

from __future__ import annotations

from .engine import WeightlaneCheckpointEngine
from .manager import CachingManager

__all__ = ["CachingManager", "WeightlaneCheckpointEngine"]
