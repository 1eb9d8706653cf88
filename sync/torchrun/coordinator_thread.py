"""`CoordinatorThread`: runs the rendezvous and the coordinator on a thread, for programs without an event loop."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Protocol, TypeVar

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    Deadline,
    DeadlineExceededError,
    ReplicaTakenError,
    WeightlaneError,
)
from weightlane.ckpt_engines.links.bounded_calls import result_of
from weightlane.ckpt_engines.runtime.threads import close_at_exit, start_thread

from ..config import SyncConfig
from ..control.coordinator.coordinator import Coordinator
from ..control.coordinator.report import SyncReport
from ..control.coordinator.roster import Replica, ReplicaState
from ..control.rendezvous import Rendezvous
from ..publisher import publisher_name

_log = logging.getLogger(__name__)
_PART = "coordinator thread"
_JOIN_S = 5.0
"""How long `close` waits for the thread to end, in seconds."""
_LEFT_S = 5.0
"""How long `close` waits until all ranks have learned the last outcome and left, in seconds. A frozen rank never leaves."""

T = TypeVar("T")


class ConnectableReplica(Replica, Protocol):
    """A running replica, which can be connected to a run by the run's address."""

    async def connect(self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> None:
        """Subscribe the replica's ranks to the run at `rendezvous`, leaving an earlier run."""


class CoordinatorThread:
    """Hosts the rendezvous and runs the coordinator, in the process of trainer rank 0.

    There are `world` trainer ranks; for the other arguments see `CollectivePublisher`.
    """

    def __init__(
        self,
        replicas: Sequence[ConnectableReplica],
        world: int,
        config: SyncConfig,
        backend: str,
        options: Mapping[str, Any],
    ) -> None:
        if not replicas:
            raise ConfigError("there is no replica to publish to.", part=_PART, hint="Give rank 0 at least one.")
        self._replicas = list(replicas)
        self._world = world
        self._config = config
        self._engine = (backend, options)
        self._rendezvous = Rendezvous.host(config.host, config.port, config.silence_s)
        self.address = self._rendezvous.address.to_plain()
        self._coordinator: Coordinator | None = None
        self._sync: Future[SyncReport] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = start_thread("weightlane-coordinator", self._run)
        close_at_exit(self)

    def connect(self) -> None:
        """Give every replica the run's address, and connect all participants.

        Raises `DeadlineExceededError` naming the replica that does not answer, or the participants that are missing.
        """
        # One limit for the replicas' answers, and a second one for connecting all participants.
        limit = Deadline.after(2 * self._config.connect_timeout_s)
        names = ", ".join(replica.name for replica in self._replicas)
        hint = "A replica does not keep the deadline of its `connect`."
        try:
            result_of(self._submit(self._connect()), limit, f"{names} to connect", _PART, hint)
        except CancelledError:
            raise ClosedError("the publisher was closed.", part=_PART) from None

    def start_sync(self, version: int) -> None:
        """Start to sync `version`; `report` waits for its end."""
        self._sync = self._submit(self._sync_all(version))

    def report(self, timeout_s: float) -> SyncReport:
        """Wait for the end of the sync that was started. Raises its error, or `DeadlineExceededError`."""
        assert self._sync is not None
        try:
            return self._sync.result(timeout_s)
        except TimeoutError:
            if self._sync.done():
                raise
            raise DeadlineExceededError(f"the sync did not end within {timeout_s:.0f} s.", part=_PART) from None
        except CancelledError:
            raise ClosedError("the publisher was closed.", part=_PART) from None

    def close(self) -> None:
        """End a running sync and the thread, once the other ranks have read the outcome of the last version.

        Idempotent, never raises.
        """
        if not self._thread.is_alive():
            return
        if self._coordinator is not None:
            self._coordinator.close()
            self._coordinator.wait_until_left(_LEFT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)
        self._rendezvous.close()

    async def _connect(self) -> None:
        await asyncio.gather(*(self._connect_replica(replica) for replica in self._replicas))
        names = [publisher_name(rank) for rank in range(self._world)]
        self._coordinator = Coordinator(self._rendezvous, names, self._replicas, self._config)
        await self._coordinator.connect()

    async def _connect_replica(self, replica: ConnectableReplica) -> None:
        deadline = Deadline.after(self._config.connect_timeout_s)
        timeout = asyncio.timeout(deadline.remaining_s)
        try:
            async with timeout:
                await replica.connect(self.address, *self._engine)
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise deadline.error("it to connect to the run", part=_PART, peer=replica.name) from error

    async def _sync_all(self, version: int) -> SyncReport:
        assert self._coordinator is not None
        states = self._coordinator.states()
        lost = [replica for replica in self._replicas if states.get(replica.name) is ReplicaState.LOST]
        await asyncio.gather(*(self._reconnect_replica(replica) for replica in lost))
        return await self._coordinator.sync(version)

    async def _reconnect_replica(self, replica: ConnectableReplica) -> None:
        """Connect a lost replica, which may have restarted; if that fails, the version is sent without it.

        Raises `ReplicaTakenError` if another publisher has taken the replica: its owner must resolve that.
        """
        try:
            async with asyncio.timeout(self._config.rejoin_s):
                await replica.connect(self.address, *self._engine)
        except ReplicaTakenError:
            raise
        except (WeightlaneError, TimeoutError) as error:
            _log.info("%s is still lost: %s", replica.name, error)

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self._loop.close()
