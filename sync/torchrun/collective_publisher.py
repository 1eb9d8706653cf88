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

import logging
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import torch

from weightlane.ckpt_engines import CheckpointEngineRegistry, ClosedError, WeightlaneError, as_weightlane_error
from weightlane.ckpt_engines.runtime.at_exit import close_at_exit

from ..config import SyncConfig
from ..publisher import Publisher
from ..report import Outcome, SyncReport
from ..version.placement import Placement
from ..version.tensor_spec import LocalShard
from .coordinator_thread import ConnectableReplica, CoordinatorThread, publisher_name
from .rank_exchange import RankExchange

_log = logging.getLogger(__name__)
_PART = "collective publisher"
_GRACE_S = 15.0
"""How much longer than a sync may take the ranks wait for its end: who is closest to a stall gives up first."""


class CollectivePublisher:
    """Publishes versions of what all trainer ranks together hold. Every rank makes one and calls the same methods in turn.

    Making it connects everything: it returns when every replica can take versions. A script that ends without `close` is closed
    when it ends; the version under way may be lost then.

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
        self._ranks = RankExchange(next((shard.data.device for shard in shards), torch.device("cpu")))
        self._config = config or SyncConfig()
        self._max_failed = max_failed
        self._failed = 0
        self._version = -1
        self._ended = True
        self._publisher: Publisher | None = None
        self._lead: CoordinatorThread | None = None
        try:
            error = self._caught(lambda: self._open(replicas))
            placement = Placement.of_shards(shards).to_plain()
            said = self._ranks.exchange({"placement": placement, "address": self._lead and self._lead.address}, error)
            options = dict(options or {})
            error = self._caught(lambda: self._join(said, shards, backend, options))
            self._ranks.exchange({}, error)  # nobody waits for a rank that could not join
            if lead := self._lead:
                error = self._caught(lambda: lead.connect(backend, options))
            self._ranks.exchange({}, error)
        except BaseException:
            self.close()
            raise
        close_at_exit(self)

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
            self._lead = CoordinatorThread(replicas, self._ranks.world, self._config)

    def _join(
        self,
        said: Sequence[Mapping[str, Any]],
        shards: Sequence[LocalShard],
        backend: str,
        options: Mapping[str, Any],
    ) -> None:
        self._publisher = Publisher(
            publisher_name(self._ranks.rank),
            said[0]["address"],
            rank=self._ranks.rank,
            placements=[Placement.from_plain(facts["placement"]) for facts in said],
            shards=shards,
            engine=CheckpointEngineRegistry().create(backend, options),
            bucket_bytes=self._config.bucket_bytes,
            deadline_s=self._config.deadline_s,
            integrity=self._config.integrity,
            quantise=self._config.quantise,
            codec=self._config.codec,
            full_every=self._config.full_every,
            network=self._config.network,
        )

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
