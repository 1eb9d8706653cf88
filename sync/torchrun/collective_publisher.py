"""`CollectivePublisher`: the complete trainer side of the sync, for plain scripts without an event loop.

Under torchrun, in every rank, after the model was sharded::

    with CollectivePublisher(shards, replicas, backend="shm") as weights:
        for step in range(1, steps + 1):
            loss(model).backward()
            weights.fence()  # parameters may change from here on
            optimizer.step()
            weights.publish(step)  # returns at once, unless the version before is still on its way

Rank 0 hosts the rendezvous and runs the coordinator on a thread. The ranks exchange JSON over torch.distributed's default process
group once, in the constructor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from weightlane.ckpt_engines import (
    CheckpointEngineRegistry,
    ClosedError,
    ConfigError,
    Deadline,
    DeadlineExceededError,
    ReplicaTakenError,
    SyncAbortedError,
    WeightlaneError,
)
from weightlane.ckpt_engines.runtime.threads import close_at_exit, start_thread
from weightlane.ckpt_engines.waits import result_of

from ..config import SyncConfig
from ..control.coordinator.coordinator import Coordinator
from ..control.coordinator.reconnection import ConnectableReplica, reconnect_lost
from ..control.coordinator.replicas import Outcome, SyncReport
from ..control.rendezvous import Rendezvous
from ..publisher import Publisher, publisher_name
from ..version.placement import Placement
from ..version.tensor_spec import LocalShard
from .rank_exchange import RankExchange

_log = logging.getLogger(__name__)
_PART = "collective publisher"
_GRACE_S = 15.0
"""Seconds that the ranks wait beyond the limits of a sync for its end, so that the participant closest to a stall fails first."""
_JOIN_S = 5.0
"""How long `close` waits for the thread to end, in seconds."""
_LEFT_S = 5.0
"""How long `close` waits until all ranks have learned the last outcome and left, in seconds. A frozen rank never leaves."""

T = TypeVar("T")


class CoordinatorThread:
    """Hosts the rendezvous and runs the coordinator on a thread, in the process of trainer rank 0, which has no event loop.

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

    def start_sync(self, version: int) -> Future[SyncReport]:
        """Start to sync `version`."""
        return self._submit(self._sync_all(version))

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
        coordinator = self._coordinator
        assert coordinator is not None
        await reconnect_lost(coordinator, self._replicas, version, self.address, self._engine, self._config.rejoin_s)
        return await coordinator.sync(version)

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


class CollectivePublisher:
    """Publishes versions of the tensors that all trainer ranks hold together. Every rank makes one and calls the same methods.

    The constructor connects all participants: it returns when every replica can receive versions. A publisher that a script does
    not close is closed when the script ends, and a version that is then being sent may be lost.

    Args:
        shards: This rank's shards; their storage must stay in place.
        replicas: The replicas that get the versions; only rank 0's are used.
        backend: Name of the checkpoint engine.
        options: Options of that engine.
        config: Deadlines, bucket size, and the address on which rank 0 hosts the rendezvous.
        max_failed: Number of failed versions in a row after which `publish` raises instead of logging a warning.
        ranks: The trainer ranks; by default torch.distributed's default group, which gathers tensors on the shards' device. With
            ``RankExchange(device, alone=True)`` this rank holds all tensors and publishes without the others, which make none.

    Raises:
        WeightlaneError: The error that kept any rank or replica from connecting, on every rank.
    """

    def __init__(
        self,
        shards: Sequence[LocalShard],
        replicas: Sequence[ConnectableReplica],
        *,
        backend: str,
        options: Mapping[str, Any] | None = None,
        config: SyncConfig | None = None,
        max_failed: int = 3,
        ranks: RankExchange | None = None,
    ) -> None:
        ranks = ranks or RankExchange(next((shard.data.device for shard in shards), torch.device("cpu")))
        self._config = config = config or SyncConfig()
        self._max_failed = max_failed
        self._failed = 0
        self._version = -1
        self._ended = True
        self._publisher: Publisher | None = None
        self._coordinator: CoordinatorThread | None = None
        self._sync: Future[SyncReport] | None = None
        """[rank 0] The sync of the newest version."""
        engine_options = dict(options or {})

        def host() -> Mapping[str, Any]:
            address = None
            if ranks.rank == 0:
                self._coordinator = CoordinatorThread(replicas, ranks.world, config, backend, engine_options)
                address = self._coordinator.address
            return {"placement": Placement.of_shards(shards).to_plain(), "address": address}

        def join() -> None:
            self._publisher = Publisher(
                publisher_name(ranks.rank),
                hosted[0]["address"],
                rank=ranks.rank,
                placements=[Placement.from_plain(each["placement"]) for each in hosted],
                shards=shards,
                engine=CheckpointEngineRegistry().create(backend, engine_options),
                config=config,
            )

        def connect() -> None:
            if self._coordinator is not None:
                self._coordinator.connect()

        try:
            hosted = ranks.gather(host)
            ranks.gather(join)
            ranks.gather(connect)
        except BaseException:
            self.close()
            raise
        close_at_exit(self)

    def publish(self, version: int) -> None:
        """Offer the current parameters as `version`. Waits until the version before has ended; does not wait for this one.

        After a failed version the replicas serve the old weights. Its failure is only logged here, since this version replaces
        it; `wait` raises it.

        Raises:
            ReplicaTakenError: Another publisher has taken a replica.
            WeightlaneError: The error of the last version, if `max_failed` versions in a row have failed.
        """
        try:
            self.wait()
        except WeightlaneError as error:
            self._failed += 1
            if self._failed >= self._max_failed or isinstance(error, ReplicaTakenError):
                raise
            _log.warning("version %d was not committed: %s", self._version, error)
        publisher = self._running()
        publisher.publish(version)
        self._version, self._ended = version, False
        if self._coordinator is not None:
            self._sync = self._coordinator.start_sync(version)

    def fence(self) -> float:
        """Wait until the newest version is copied, so that parameters may change; see `Publisher.fence`. Returns the seconds."""
        return self._running().fence()

    def wait(self) -> SyncReport | None:
        """Wait until the newest version has ended. Returns its report on rank 0, the first time; None otherwise.

        Raises:
            SyncAbortedError: Too few replicas have committed the version, with the reason. They serve the old version.
            ReplicaTakenError: Another publisher has taken a replica.
        """
        if self._ended:
            return None
        self._ended = True
        publisher = self._running()
        timeout_s = self._config.deadline_s + self._config.rejoin_s + _GRACE_S
        if self._sync is None:
            try:
                publisher.wait(self._version, timeout_s)
            except SyncAbortedError as error:
                if isinstance(error.reason, ReplicaTakenError):
                    raise error.reason from error  # as on rank 0
                raise
            report = None
        else:
            try:
                report = self._sync.result(timeout_s)
            except TimeoutError:
                if self._sync.done():
                    raise
                raise DeadlineExceededError(f"the sync did not end within {timeout_s:.0f} s.", part=_PART) from None
            except CancelledError:
                raise ClosedError("the publisher was closed.", part=_PART) from None
            for name, part in report.replicas.items():
                if part.outcome is not Outcome.COMMITTED:
                    _log.warning(
                        "version %d was committed without %s, which is %s: %s",
                        report.version,
                        name,
                        part.outcome,
                        part.error,
                    )
        self._failed = 0
        return report

    def close(self) -> None:
        """Leave the run. The replicas serve the weights they have. Idempotent, never raises."""
        coordinator, self._coordinator = self._coordinator, None
        publisher, self._publisher = self._publisher, None
        if coordinator is not None:
            coordinator.close()
        if publisher is not None:
            publisher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """`wait` for the newest version unless the block failed, then `close`."""
        try:
            if kind is None:
                self.wait()
        finally:
            self.close()

    def _running(self) -> Publisher:
        if self._publisher is None:
            raise ClosedError("the publisher was closed.", part=_PART)
        return self._publisher
