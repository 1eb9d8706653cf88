"""`CachingManager`: a checkpoint engine manager for verl that lets rollouts serve requests while weights are transferred."""

from __future__ import annotations

import asyncio
from typing import Any

from verl.checkpoint_engine.base import CheckpointEngineManager, _worker_cls
from verl.single_controller.ray import RayClassWithInitArgs, RayWorkerGroup
from verl.utils.ray_utils import auto_await


class CachingManager(CheckpointEngineManager):  # type: ignore[misc]  # verl is untyped to us
    """Transfers weights into the rollout workers' host memory, and aborts requests only to load them from there.

    verl's own manager aborts every request before it connects. It takes this class where the trainer reads
    ``rollout.checkpoint_manager_class``, and needs ``engine_kwargs.weightlane.cache``. If a transfer fails, the rollouts continue
    to serve the weights that they have.
    """

    @auto_await  # type: ignore[untyped-decorator]
    async def update_weights(self, global_steps: int | None = None) -> dict[str, Any]:
        """See `CheckpointEngineManager.update_weights`."""
        trainers, workers = self.actor_wg, [worker for replica in self.replicas for worker in replica.workers]
        rollouts = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=RayClassWithInitArgs(cls=_worker_cls))
        self.build_process_group(rollouts)
        metrics, *_ = await asyncio.gather(
            *trainers.update_weights(global_steps=global_steps, mode=self.backend),
            *rollouts.execute_checkpoint_engine(["fill_cache"] * len(workers), [global_steps] * len(workers)),
        )
        await asyncio.gather(
            *trainers.execute_checkpoint_engine(["finalize"] * trainers.world_size),
            *rollouts.execute_checkpoint_engine(["finalize"] * len(workers)),
        )
        await self.abort_replicas()
        await self.release_kv_cache_replicas()
        await asyncio.gather(*rollouts.update_weights(global_steps=global_steps))
        await self.resume_kv_cache_replicas()
        await self.resume_generation_replicas()
        return dict(metrics)
