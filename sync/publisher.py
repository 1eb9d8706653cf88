"""`Publisher`: the trainer rank's end. Snapshots behind the optimizer's back, packs, seals and sends.

On every trainer rank there is one. Each copies its own shards into a snapshot; the rank with an engine sender (rank 0)
fills buckets from all ranks' snapshots and sends them, the others hand it their pieces over a process group of their own
that the training never uses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weightlane.ckpt_engines import (
    CheckpointEngine,
    ClosedError,
    Deadline,
    Delivery,
    SupersededError,
    Topology,
    WeightlaneError,
    WeightSender,
    as_weightlane_error,
)
from weightlane.plugins import RunHooks

from .devices import buffer_device
from .gather import ShardGather
from .manifest import Manifest
from .messages import Connect, EngineTraits, Go, Message, Offer, Sent
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

    The newest snapshot is kept until the next `publish`: it can be sent again, on another connection after a failure or to a
    replica that joins late.

    Args:
        name: This participant's name, e.g. ``"trainer-0"``.
        rendezvous: Where the run meets, as plain data or an address.
        rank: This rank among the trainer ranks, which all publish the same versions in the same order.
        world: Number of trainer ranks.
        specs: Every tensor of the checkpoint, the same list on every rank.
        shards: What this rank holds. Storage must stay in place; values are read between `publish` and the fence.
        engine: The transport; used by rank 0 only.
        bucket_bytes: Payload of a bucket.
        deadline_s: Longest time the fence waits for a snapshot, in seconds.
        hooks: Observers; those of this process by default.
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
        hooks: RunHooks | None = None,
    ) -> None:
        super().__init__(name, rendezvous, hooks)
        self._rank, self._world = rank, world
        self._engine = engine
        self._layout = Manifest(0, tuple(specs), bucket_bytes, whole_tensors=engine.capabilities.persistent)
        self._table = RunTable.of_shards(shards, self._layout)
        self._deadline_s = deadline_s
        self._snapshot = Snapshot(shards, buffer_device(engine, next((shard.data.device for shard in shards), None)))
        self._sender: WeightSender | None = None
        self._pipeline: SendPipeline | None = None
        self._gather: ShardGather | None = None
        self._changed = threading.Condition()
        self._next: _Publication | None = None
        """Published, its snapshot not begun."""
        self._held = -1
        """The version the snapshot holds; -1 while there is none or it is being taken."""
        self._offered_to = ""
        """The session in which the held version was offered."""
        self._go: Go | None = None
        self._unsent = -1
        """The newest published version while nobody has sent it or given it up."""
        self._fence: _Publication | None = None
        self._worker = threading.Thread(target=self._run, name=f"weightlane-publish-{name}", daemon=True)
        self._worker.start()
        self.start()

    @property
    def busy(self) -> bool:
        """Whether the newest published version is neither sent nor given up yet."""
        return self._unsent >= 0

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
        with self._changed:
            given_up, self._next = self._next, publication
            self._unsent = version
            self._changed.notify_all()
        if given_up is not None:
            given_up.snapshot_done.set()
            self._report_superseded(given_up.version)

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
        """Block until `version` serves. Raises `SyncAbortedError` with the reason everybody got."""
        self._outcomes.wait(version, Deadline.after(timeout_s), self.name)

    def close(self) -> None:
        """Stop publishing; see `Participant.close`."""
        super().close()
        with self._changed:
            self._changed.notify_all()
        self._worker.join(5.0)

    # -- control thread -------------------------------------------------------------------------------------------------

    def _open_half(self) -> tuple[dict[str, Any], EngineTraits | None]:
        if self._rank != 0:
            return {}, None
        self._sender = self._engine.make_sender(self.name)
        facts = self._engine.capabilities
        traits = EngineTraits(
            selective=not facts.delivery.isdisjoint({Delivery.POINT_TO_POINT, Delivery.STORE}),
            elastic=facts.elastic,
            persistent=facts.persistent,
        )
        return dict(self._sender.address()), traits

    def _connect_half(self, message: Connect, topology: Topology, deadline: Deadline) -> None:
        gather = ShardGather.connect(
            self.rendezvous,
            message.session,
            message.publishers,
            self._rank,
            self._table,
            self._layout,
            self._snapshot.data.device,
            deadline,
        )
        with self._changed:
            sender = self._sender
            if kept := self._is_current(message.session):
                self._gather = gather
        if not kept:
            gather.close()
            raise self._closed_while_connecting()
        if sender is not None:
            pipeline = SendPipeline(sender, self._layout, list(topology.receivers), on_sent=self._sent)
            try:
                pipeline.connect(topology, self.rendezvous.mailbox(f"engine/{message.session}"), deadline)
            except BaseException:
                pipeline.close()
                raise
            with self._changed:
                if kept := self._is_current(message.session):
                    self._pipeline = pipeline
            if not kept:
                pipeline.close()
                raise self._closed_while_connecting()

    def _is_current(self, session: str) -> bool:
        """Whether what was connected for `session` is to be kept; ask under `_changed`."""
        return self.session == session and not self._closed.is_set()

    def _closed_while_connecting(self) -> ClosedError:
        return ClosedError("the connection was closed while connecting.", part=self.name)

    def _close_half(self) -> None:
        with self._changed:
            parts = (self._sender, self._pipeline, self._gather)
            self._sender = self._pipeline = self._gather = self._go = None
        for part in parts:
            if part is not None:
                part.close()

    def _connected(self) -> None:
        super()._connected()
        with self._changed:  # there may be something to offer
            self._changed.notify_all()

    def _handle(self, message: Message) -> None:
        if isinstance(message, Go):
            with self._changed:
                self._go = message
                self._changed.notify_all()

    def _aborted(self, version: int) -> None:
        self._settled(version)

    def _committed(self, version: int) -> None:
        self._settled(version)
        pipeline = self._pipeline
        if pipeline is None or not self._engine.capabilities.persistent:
            return
        try:
            pipeline.commit_version(version, Deadline.after(self._deadline_s))
        except WeightlaneError as error:
            _log.warning("%s: version %d serves but could not be marked as committed: %s", self.name, version, error)

    def _settled(self, version: int) -> None:
        with self._changed:
            if self._unsent == version:
                self._unsent = -1

    # -- publishing thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed.is_set() or self._work_waiting())
                if self._closed.is_set():
                    return
                go = publication = None
                if self._may_stream():
                    go, self._go = self._go, None
                else:
                    publication, self._next = self._next, None
            if go is not None and go.version < self._held:
                self._report_superseded(go.version)
            elif go is not None:
                self._stream(go)
            elif publication is not None:
                self._take(publication)
            else:
                self._offer()

    def _work_waiting(self) -> bool:
        return self._may_stream() or self._next is not None or self._may_offer()

    def _may_stream(self) -> bool:
        # Another rank may have published, and the coordinator gone ahead, before this one.
        return self._go is not None and self._go.version <= self._held

    def _may_offer(self) -> bool:
        return self._held >= 0 and bool(self.ready_session) and self._offered_to != self.ready_session

    def _take(self, publication: _Publication) -> None:
        given_up = self._held if self._held == self._unsent else -1
        self._held = -1
        started = time.perf_counter()
        try:
            self._snapshot.take(publication.mark)
        except Exception as error:  # noqa: BLE001 - the fence raises it in the training thread
            publication.error = as_weightlane_error(error, self.name)
        publication.snapshot_done.set()
        if publication.error is not None:
            self._report(publication.version, self.session, publication.error)
            return
        self._held, self._offered_to = publication.version, ""
        facts = {
            "seconds": time.perf_counter() - started,
            "nbytes": self._snapshot.data.numel(),
            "participant": self.name,
        }
        self.hooks.snapshot_taken(version=publication.version, facts=facts)
        if given_up >= 0:
            self._report_superseded(given_up)

    def _offer(self) -> None:
        """Offer the held version in the present session; rank 0 speaks for all ranks."""
        session = self._offered_to = self.ready_session
        if self._rank != 0:
            return
        try:
            manifest = replace(self._layout, version=self._held)
            self._tell(Offer(name=self.name, session=session, version=self._held, manifest=manifest.to_plain()))
        except WeightlaneError as error:
            _log.warning("%s: version %d could not be offered: %s", self.name, self._held, error)

    def _stream(self, go: Go) -> None:
        try:
            started = time.perf_counter()
            nbytes = self._send(go, Deadline.after(go.deadline_s))
            seconds = time.perf_counter() - started
            self._settled(go.version)
            self._tell(Sent(name=self.name, session=go.session, version=go.version, nbytes=nbytes, seconds=seconds))
        except Exception as error:  # noqa: BLE001 - the coordinator decides what becomes of the version
            _log.info("%s: version %d was not sent: %s", self.name, go.version, error)
            self._report(go.version, go.session, error)

    def _report_superseded(self, version: int) -> None:
        self._report(version, self.session, _superseded(version, self.name))

    def _send(self, go: Go, deadline: Deadline) -> int:
        gather, pipeline = self._gather, self._pipeline
        if gather is None:
            raise ClosedError("the connection was closed before the version was sent.", part=self.name)
        if pipeline is None:
            return gather.give(self._snapshot.data, deadline)
        return pipeline.send_version(
            go.version,
            lambda index, payload: gather.fill(self._snapshot.data, index, payload, deadline),
            deadline,
            receivers=go.receivers,
            stall_s=go.stall_s,
        )

    def _sent(self, version: int, index: int, nbytes: int, seconds: float) -> None:
        facts = {"seconds": seconds, "nbytes": nbytes, "participant": self.name}
        self.hooks.bucket_sent(version=version, index=index, facts=facts)


def _superseded(version: int, part: str) -> SupersededError:
    return SupersededError(f"version {version} was given up for a newer one.", part=part)
