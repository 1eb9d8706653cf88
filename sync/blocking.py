"""`CollectivePublisher`: the trainer's whole end of the hop, for plain scripts that have no event loop of their own.

Under torchrun, in every rank, after the model was sharded::

    with CollectivePublisher(shards, replicas, backend="shm") as weights:
        for step in range(1, steps + 1):
            loss(model).backward()
            weights.fence()  # parameters may change from here on
            optimizer.step()
            weights.publish(step)  # returns at once; the next forward and backward overlap the transfer

Rank 0 hosts the rendezvous and runs the coordinator on a thread; the ranks agree over the default process group of
torch.distributed when they begin, and never again: what they say is JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import (
    CheckpointEngineRegistry,
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    WeightlaneError,
    as_weightlane_error,
    error_from_wire,
)

from .config import SyncConfig
from .coordinator import Coordinator
from .publisher import Publisher
from .rendezvous import Rendezvous
from .report import Outcome, SyncReport
from .roster import Replica, ReplicaState
from .tensor_spec import LocalShard, TensorSpec, dtype_of

_log = logging.getLogger(__name__)
_PART = "collective publisher"
_GRACE_S = 15.0
"""How much longer than a sync may take the ranks wait for its end: who is closest to a stall gives up first."""
_JOIN_S = 5.0

T = TypeVar("T")


class ConnectableReplica(Replica, Protocol):
    """A replica that is running already and only has to be told where the weights come from."""

    async def connect(self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> None:
        """Subscribe its ranks to the run at `rendezvous`, leaving an earlier one."""


class CollectivePublisher:
    """Publishes versions of what all trainer ranks together hold. Every rank makes one and calls the same methods in turn.

    Making it connects everything: it returns when every replica can take versions.

    Args:
        shards: What this rank holds; their storage must stay in place.
        replicas: Who takes the versions; rank 0's count, the other ranks may give none.
        backend: Name of the checkpoint engine.
        options: Options of that engine.
        config: Deadlines, bucket size, and the address on which rank 0 meets the replicas.
        max_failed: After how many versions in a row that no replica took `publish` raises instead of warning.

    Raises:
        WeightlaneError: What kept any rank or replica from connecting, on every rank.
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
    ) -> None:
        self._ranks = _Ranks(next((shard.data.device for shard in shards), torch.device("cpu")))
        self._config = config or SyncConfig()
        self._max_failed = max_failed
        self._failed = 0
        self._version = -1
        self._ended = True
        self._publisher: Publisher | None = None
        self._lead: _Lead | None = None
        try:
            error = self._caught(lambda: self._open(replicas))
            specs = [shard.spec.to_plain() for shard in shards]
            said = self._ranks.exchange({"specs": specs, "address": self._lead and self._lead.address}, error)
            every_spec = list({spec[0]: spec for facts in said for spec in facts["specs"]}.values())
            options = dict(options or {})
            error = self._caught(lambda: self._join(said[0]["address"], every_spec, shards, backend, options))
            self._ranks.exchange({}, error)
        except BaseException:
            self.close()
            raise

    def publish(self, version: int) -> None:
        """Offer the parameters as they are now as `version`, once the version before it has ended. Otherwise returns at once.

        A version that failed leaves the old weights serving and is only logged here, since the next one replaces it; use
        `wait` to learn of each.

        Raises:
            WeightlaneError: `max_failed` versions in a row failed; the last one's error.
        """
        try:
            self.wait()
        except WeightlaneError as error:
            self._failed += 1
            if self._failed >= self._max_failed:
                raise
            _log.warning("version %d was not taken: %s", self._version, error)
        publisher = self._running()
        publisher.publish(version)
        self._version, self._ended = version, False
        if self._lead is not None:
            self._lead.begin(version)

    def fence(self) -> float:
        """Wait until the newest version is copied, so that parameters may change; see `Publisher.fence`. Returns the seconds."""
        return self._running().fence()

    def wait(self) -> SyncReport | None:
        """Wait until the newest version has ended. Returns its report on rank 0, and None elsewhere or if it was asked for.

        Raises:
            SyncAbortedError: Too few replicas took it, with the reason; the old one keeps serving.
        """
        if self._ended:
            return None
        self._ended = True
        publisher = self._running()
        timeout_s = self._config.deadline_s + self._config.rejoin_s + _GRACE_S
        if self._lead is not None:
            report = self._lead.end(timeout_s)
            self._failed = 0
            for name, part in report.replicas.items():
                if part.outcome is not Outcome.COMMITTED:
                    _log.warning(
                        "version %d went on without %s, which is %s: %s", report.version, name, part.outcome, part.error
                    )
            return report
        publisher.wait(self._version, timeout_s)
        self._failed = 0
        return None

    def close(self) -> None:
        """Leave. The replicas go on with the weights they have. Idempotent, never raises."""
        lead, self._lead = self._lead, None
        publisher, self._publisher = self._publisher, None
        if lead is not None:
            lead.close()
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

    def _open(self, replicas: Sequence[ConnectableReplica]) -> None:
        if self._ranks.rank == 0:
            self._lead = _Lead(replicas, self._ranks.world, self._config)

    def _join(
        self,
        rendezvous: Mapping[str, Any],
        specs: Sequence[Any],
        shards: Sequence[LocalShard],
        backend: str,
        options: Mapping[str, Any],
    ) -> None:
        self._publisher = Publisher(
            _publisher_name(self._ranks.rank),
            rendezvous,
            rank=self._ranks.rank,
            world=self._ranks.world,
            specs=[TensorSpec(name, tuple(shape), dtype_of(dtype)) for name, shape, dtype in specs],
            shards=shards,
            engine=CheckpointEngineRegistry().create(backend, options),
            bucket_bytes=self._config.bucket_bytes,
            deadline_s=self._config.deadline_s,
        )
        if self._lead is not None:
            self._lead.connect(backend, options)

    def _running(self) -> Publisher:
        if self._publisher is None:
            raise ClosedError("the publisher was closed.", part=_PART)
        return self._publisher

    def _caught(self, step: Callable[[], None]) -> WeightlaneError | None:
        """What `step` raised: the ranks must hear of it before any of them leaves."""
        try:
            step()
        except Exception as error:  # noqa: BLE001 - any error must reach the other ranks, which wait for this one
            return as_weightlane_error(error, f"trainer rank {self._ranks.rank}")
        return None


class _Lead:
    """What rank 0 does beside publishing: it hosts the rendezvous and runs the coordinator on a thread of its own."""

    def __init__(self, replicas: Sequence[ConnectableReplica], world: int, config: SyncConfig) -> None:
        if not replicas:
            raise ConfigError("there is no replica to publish to.", part=_PART, hint="Give rank 0 at least one.")
        self._replicas = list(replicas)
        self._world = world
        self._config = config
        self._rendezvous = Rendezvous.host(config.host, config.port)
        self.address = self._rendezvous.address.to_plain()
        self._transport: tuple[str, Mapping[str, Any]] = ("", {})
        self._coordinator: Coordinator | None = None
        self._syncing: Future[SyncReport] | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="weightlane-coordinator", daemon=True)
        self._thread.start()

    def connect(self, backend: str, options: Mapping[str, Any]) -> None:
        """Tell every replica where the weights come from, and bring all participants together."""
        self._transport = (backend, options)
        # Every wait in there has a deadline, so this one needs none.
        self._submit(self._connect(backend, options)).result()

    def begin(self, version: int) -> None:
        """Carry `version` over; `end` waits for it."""
        assert self._coordinator is not None
        self._syncing = self._submit(self._sync(version))

    def end(self, timeout_s: float) -> SyncReport:
        """The report of the version that was begun."""
        assert self._syncing is not None
        try:
            return self._syncing.result(timeout_s)
        except TimeoutError:
            if self._syncing.done():
                raise
            raise DeadlineExceededError(f"the sync did not end within {timeout_s:.0f} s.", part=_PART) from None
        except CancelledError:
            raise ClosedError("the publisher was closed.", part=_PART) from None

    def close(self) -> None:
        """End what is under way, and the thread. Never raises."""
        if self._coordinator is not None:
            self._coordinator.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_JOIN_S)

    async def _connect(self, backend: str, options: Mapping[str, Any]) -> None:
        await asyncio.gather(*(replica.connect(self.address, backend, options) for replica in self._replicas))
        names = [_publisher_name(rank) for rank in range(self._world)]
        self._coordinator = Coordinator(self._rendezvous, names, self._replicas, self._config)
        await self._coordinator.connect()

    async def _sync(self, version: int) -> SyncReport:
        assert self._coordinator is not None
        states = self._coordinator.states()
        lost = [replica for replica in self._replicas if states.get(replica.name) is ReplicaState.LOST]
        await asyncio.gather(*(self._call_back(replica) for replica in lost))
        return await self._coordinator.sync(version)

    async def _call_back(self, replica: ConnectableReplica) -> None:
        """A replica that was lost may have been started again; if it was not, the version goes on without it."""
        try:
            async with asyncio.timeout(self._config.rejoin_s):
                await replica.connect(self.address, *self._transport)
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


class _Ranks:
    """The trainer ranks, which tell each other plain data over torch.distributed's default group. One rank needs no group."""

    def __init__(self, device: torch.device) -> None:
        joined = dist.is_initialized()
        self.rank = dist.get_rank() if joined else 0
        self.world = dist.get_world_size() if joined else 1
        self._device = device

    def exchange(self, mine: Mapping[str, Any], error: WeightlaneError | None = None) -> list[dict[str, Any]]:
        """What every rank says, in rank order. Collective. Where any rank has an error, all raise the first one."""
        words = json.dumps({"facts": mine, "error": error.to_wire() if error else None}).encode()
        said = [json.loads(each) for each in self._all_gather(words)]
        if error is not None:
            raise error
        for each in said:
            if each["error"] is not None:
                raise error_from_wire(each["error"])
        return [each["facts"] for each in said]

    def _all_gather(self, mine: bytes) -> list[bytes]:
        if self.world == 1:
            return [mine]
        sizes = [torch.zeros(1, dtype=torch.int64, device=self._device) for _ in range(self.world)]
        dist.all_gather(sizes, torch.tensor([len(mine)], device=self._device))
        room = max(int(size.item()) for size in sizes)
        padded = torch.zeros(room, dtype=torch.uint8, device=self._device)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(self._device)
        everything = [torch.empty_like(padded) for _ in range(self.world)]
        dist.all_gather(everything, padded)
        return [bytes(each[: int(size.item())].cpu().numpy()) for each, size in zip(everything, sizes, strict=True)]


def _publisher_name(rank: int) -> str:
    return f"trainer-{rank}"
