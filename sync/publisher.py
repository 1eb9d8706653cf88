"""`Publisher`: the trainer rank's end. Snapshots behind the optimizer's back, packs, seals and sends.

On every trainer rank there is one. Each copies its own shards into a snapshot; the rank with an engine sender (rank 0)
fills buckets from all ranks' snapshots and sends them, the others hand it their pieces over a process group of their own
that the training never uses.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from weightlane.ckpt_engines import (
    CheckpointEngine,
    ClosedError,
    Deadline,
    SupersededError,
    Topology,
    WeightSender,
    as_weightlane_error,
)

from .devices import buffer_device
from .gather import ShardGather
from .manifest import Manifest
from .messages import Connect, Go, Message, Offer, Sent
from .packing import RunTable
from .participant import Participant
from .rendezvous import RendezvousAddress
from .send_pipeline import SendPipeline
from .snapshot import Snapshot
from .tensor_spec import LocalShard, TensorSpec

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Publication:
    version: int
    mark: torch.cuda.Event | None
    snapshot_done: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


class Publisher(Participant):
    """Publishes weight versions of one trainer rank.

    Args:
        name: This participant's name, e.g. ``"trainer-0"``.
        rendezvous: Where the run meets, as plain data or an address.
        rank: This rank among the trainer ranks, which all publish the same versions in the same order.
        world: Number of trainer ranks.
        specs: Every tensor of the checkpoint, the same list on every rank.
        shards: What this rank holds. Storage must stay in place; values are read between `publish` and the fence.
        engine: The transport; used by rank 0 only.
        bucket_bytes: Payload of a bucket.
        deadline_s: Longest time from a snapshot to its end, in seconds.
    """

    def __init__(
        self,
        name: str,
        rendezvous: RendezvousAddress | Mapping[str, Any],
        *,
        rank: int,
        world: int,
        specs: Sequence[TensorSpec],
        shards: Sequence[LocalShard],
        engine: CheckpointEngine,
        bucket_bytes: int,
        deadline_s: float = 60.0,
    ) -> None:
        super().__init__(name, rendezvous)
        self._rank, self._world = rank, world
        self._layout = Manifest(0, tuple(specs), bucket_bytes)
        self._table = RunTable.of_shards(shards, self._layout)
        self._engine = engine
        self._deadline_s = deadline_s
        self._snapshot = Snapshot(shards, buffer_device(engine, next((shard.data.device for shard in shards), None)))
        self._sender: WeightSender | None = None
        self._pipeline: SendPipeline | None = None
        self._gather: ShardGather | None = None
        self._go: dict[int, Go] = {}
        self._current: _Publication | None = None
        self._fence: _Publication | None = None
        self._work: queue.SimpleQueue[_Publication | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name=f"weightlane-publish-{name}", daemon=True)
        self._worker.start()
        self.start()

    @property
    def busy(self) -> bool:
        """Whether an earlier version is still being snapshot or streamed."""
        return self._current is not None

    def publish(self, version: int) -> None:
        """Offer the parameters as they are now as `version`. Returns at once.

        The snapshot is taken in the background; `fence` must be passed before any parameter changes. An earlier version that
        is not streaming yet is given up in favour of this one; while one is streaming, the new snapshot waits for it, and
        the fence with it: look at `busy` first. Every rank must publish the same versions in the same order.

        Raises `ClosedError` after `close`.
        """
        if self._closed.is_set():
            raise ClosedError("publish was called on a closed publisher.", part=self.name)
        publication = _Publication(version, self._snapshot.mark())
        self._outcomes.begin(version)
        self._fence = publication
        self._current = publication
        self._work.put(publication)
        self._outcomes.notify()

    def fence(self) -> float:
        """Wait until the newest published version is snapshot, so that parameters may change. Returns the seconds waited.

        Raises `DeadlineExceededError` when the snapshot takes longer than the deadline, or what made it fail.
        """
        publication = self._fence
        if publication is None:
            return 0.0
        started = time.perf_counter()
        deadline = Deadline.after(self._deadline_s)
        if not publication.snapshot_done.wait(deadline.remaining_s):
            raise deadline.error(f"the snapshot of version {publication.version}", part=self.name)
        if publication.error is not None:
            raise publication.error
        self._fence = None
        return time.perf_counter() - started

    def wait(self, version: int, timeout_s: float) -> None:
        """Block until every replica serves `version`. Raises `SyncAbortedError` with the reason everybody got."""
        self._outcomes.wait(version, Deadline.after(timeout_s), self.name)

    def close(self) -> None:
        """Stop publishing; see `Participant.close`."""
        super().close()
        self._work.put(None)
        self._worker.join(5.0)

    # -- control thread -------------------------------------------------------------------------------------------------

    def _open_half(self) -> dict[str, Any]:
        if self._rank != 0:
            return {}
        self._sender = self._engine.make_sender(self.name)
        return dict(self._sender.address())

    def _connect_half(self, message: Connect, topology: Topology, deadline: Deadline) -> None:
        self._gather = ShardGather.connect(
            self.rendezvous,
            message.session,
            message.publishers,
            self._rank,
            self._table,
            self._layout,
            self._snapshot.data.device,
            deadline,
        )
        if self._sender is not None:
            self._pipeline = SendPipeline(self._sender, self._layout, list(topology.receivers))
            self._pipeline.connect(topology, self.rendezvous.mailbox(f"engine/{message.session}"), deadline)

    def _close_half(self) -> None:
        for part in (self._sender, self._pipeline, self._gather):
            if part is not None:
                part.close()
        self._sender = self._pipeline = self._gather = None
        self._go = {}

    def _handle(self, message: Message) -> None:
        if isinstance(message, Go):
            self._go = {message.version: message}
            self._outcomes.notify()

    # -- publishing thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (publication := self._work.get()) is not None:
            try:
                self._snapshot.take(publication.mark)
            except Exception as error:  # noqa: BLE001 - the fence raises it in the training thread
                publication.error = as_weightlane_error(error, self.name)
            publication.snapshot_done.set()
            if publication.error is None:
                self._stream(publication.version)
            if self._current is publication:
                self._current = None

    def _stream(self, version: int) -> None:
        session = ""
        try:
            go = self._agree(version, Deadline.after(self._deadline_s))
            session = go.session
            started = time.perf_counter()
            nbytes = self._send(version, Deadline.after(go.deadline_s))
            seconds = time.perf_counter() - started
            self._tell(Sent(name=self.name, session=session, version=version, nbytes=nbytes, seconds=seconds))
        except Exception as error:  # noqa: BLE001 - the coordinator aborts the version with it on every side
            _log.info("%s: version %d was not sent: %s", self.name, version, error)
            self._give_up(version, session or self.session, error)

    def _agree(self, version: int, deadline: Deadline) -> Go:
        """Offer the version (rank 0 speaks for all ranks) until every receiver accepted it, over reconnections."""
        waiting_for = f"every receiver to accept version {version}"
        while (go := self._go.get(version)) is None:
            self._outcomes.wait_until(
                lambda: bool(self.ready_session) or self._superseded(version), version, deadline, waiting_for, self.name
            )
            session = self.ready_session
            if session and self._rank == 0:
                manifest = Manifest(version, self._layout.specs, self._layout.bucket_bytes)
                self._tell(Offer(name=self.name, session=session, version=version, manifest=manifest.to_plain()))
            answered = partial(self._answered, version, session)
            self._outcomes.wait_until(answered, version, deadline, waiting_for, self.name)
            if version not in self._go and self._superseded(version):
                raise SupersededError(f"version {version} was given up for a newer one.", part=self.name)
        return go

    def _answered(self, version: int, session: str) -> bool:
        return version in self._go or self.ready_session != session or self._superseded(version)

    def _superseded(self, version: int) -> bool:
        return self._current is not None and self._current.version > version

    def _send(self, version: int, deadline: Deadline) -> int:
        gather, pipeline = self._gather, self._pipeline
        if gather is None:
            raise ClosedError("the connection was closed before the version was sent.", part=self.name)
        if pipeline is None:
            return gather.give(self._snapshot.data, deadline)
        return pipeline.send_version(
            version, lambda index, payload: gather.fill(self._snapshot.data, index, payload, deadline), deadline
        )
