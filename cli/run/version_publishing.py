"""`VersionPublishing`: brings versions of trainer ranks to servers that run already, or into a store."""

from __future__ import annotations

import asyncio
import os
from typing import Self

from weightlane.ckpt_engines import CheckpointEngineRegistry
from weightlane.plugins import RunHooks
from weightlane.rollout import ServerReplica
from weightlane.sync import CheckpointEngineConfig, Coordinator, Rendezvous, SyncConfig, dtype_of
from weightlane.sync.control.coordinator.reconnection import reconnect_lost
from weightlane.trainer.dispatch.role import Role

from ..config.worker_config import RolloutsSection


class VersionPublishing:
    """Publishes versions of `policy`, whose ranks have started. `connect` must come first, and `close` last.

    Args:
        policy: The role whose ranks publish.
        engine: The checkpoint engine.
        sync: Settings of the sync.
        rollouts: The servers; there may be none for an engine that stores versions.
        dtype: Dtype of floating-point tensors on the wire.
        hooks: Notified of every sync.
    """

    def __init__(
        self,
        policy: Role,
        engine: CheckpointEngineConfig,
        sync: SyncConfig,
        rollouts: RolloutsSection,
        dtype: str,
        hooks: RunHooks | None = None,
    ) -> None:
        self._policy, self._engine, self._sync, self._dtype = policy, engine, sync, dtype
        capabilities = CheckpointEngineRegistry().engine_class(engine.backend).capabilities
        self._stores = capabilities.persistent
        token = os.environ.get("VLLM_API_KEY", "")
        self._servers = [
            ServerReplica(
                url,
                tensor_parallel=rollouts.tensor_parallel,
                token=token,
                connect_timeout_s=sync.connect_timeout_s,
                commit_timeout_s=sync.deadline_s,
                take_over=rollouts.take_over,
            )
            for url in rollouts.servers
        ]
        self._rendezvous = Rendezvous.host(sync.host, sync.port, sync.silence_s)
        self._coordinator = Coordinator(self._rendezvous, policy.publisher_names(), self._servers, sync, hooks=hooks)

    async def connect(self) -> Self:
        """Connect the ranks and all servers. Raises the error of the first one that cannot be connected."""
        address = self._rendezvous.address.to_plain()
        await asyncio.gather(
            self._policy.connect(address, self._engine, self._sync, dtype_of(self._dtype)),
            *(server.connect(address, self._engine.backend, self._engine.options) for server in self._servers),
        )
        await self._coordinator.connect()
        return self

    async def publish(self, version: int) -> None:
        """Wait until `version`, which the ranks have published, serves, and is stored if the engine stores versions.

        A server that was lost, and may have been started again, is connected first.

        Raises:
            SyncAbortedError: Too few servers could commit it; see `SyncConfig.quorum`.
            ReplicaTakenError: Another publisher has taken a server.
            WeightlaneError: It could not be stored.
        """
        engine = (self._engine.backend, self._engine.options)
        address = self._rendezvous.address.to_plain()
        await reconnect_lost(self._coordinator, self._servers, version, address, engine, self._sync.rejoin_s)
        await self._coordinator.sync(version)
        if self._stores:
            await self._policy.wait_stored(version, self._sync.deadline_s)

    def close(self) -> None:
        """Leave the servers. Never raises."""
        self._coordinator.close()
        self._rendezvous.close()
