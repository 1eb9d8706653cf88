"""`Publisher`: the trainer rank's end of a run. It publishes weight versions while training continues.

Every trainer rank has one. One thread copies the rank's shards into a snapshot, another already sends the copied bytes. For the
steps see `weightlane.sync.send`.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

from weightlane.ckpt_engines import (
    CheckpointEngine,
    ClosedError,
    Deadline,
    SupersededError,
    as_weightlane_error,
)
from weightlane.ckpt_engines.runtime.threads import start_thread
from weightlane.plugins import RunHooks

from .config import SyncConfig
from .control.messages import Connect, EngineTraits, Full, Go, Message
from .control.participant import JOIN_THREAD_S, Participant, checked_version
from .control.rendezvous import RendezvousAddress
from .plan.session_plan import SessionPlan
from .send.publication import Publication, SendSession
from .send.publication_queue import PublicationQueue, key_of
from .send.sending_rank import SendingRank
from .send.version_storing import VersionStoring
from .version.placement import Placement, aliases
from .version.tensor_spec import LocalShard

_log = logging.getLogger(__name__)
_NOTABLE_S = 0.05
"""A longer wait at the fence is logged, once, because it slows training down noticeably."""


def publisher_name(rank: int) -> str:
    """The name under which a trainer rank publishes."""
    return f"trainer-{rank}"


class Publisher(Participant):
    """Publishes weight versions of one trainer rank.

    The newest snapshot is kept until the next `publish`: it can be sent again, in another session after a failure or to a replica
    that joins late. It is sent while it is being taken, directly from the engine's memory. The exception is an engine that stores
    versions: with several trainer ranks, rank 0 gathers every version.

    Args:
        name: This participant's name, e.g. ``"trainer-0"``.
        rendezvous: Address of the run's rendezvous, as an object or as plain data.
        shards: The shards of this rank. Storage must stay in place; values are read between `publish` and the fence.
        engine: The transport.
        config: Settings of the sync, the same as the coordinator's.
        rank: This rank among the trainer ranks, which all publish the same versions in the same order.
        placements: The slices that each trainer rank holds, in rank order; by default there is one rank.
        hooks: Observers; those of this process by default.

    Raises:
        StorageError: There is no room for the snapshot in the engine's memory.
        ManifestError: The ranks together do not hold every element, or this rank's shards are not those of its placement.
        ConfigError: Nothing can be quantised, the engine cannot send the parameters' memory, or its receivers cannot relay.
    """

    def __init__(
        self,
        name: str,
        rendezvous: RendezvousAddress | Mapping[str, Any],
        *,
        shards: Sequence[LocalShard],
        engine: CheckpointEngine,
        config: SyncConfig | None = None,
        rank: int = 0,
        placements: Sequence[Placement] | None = None,
        hooks: RunHooks | None = None,
    ) -> None:
        config = config or SyncConfig()
        self._kept = aliases(shards)
        """The name of the tensor that is sent instead, by alias."""
        shards = [shard for shard in shards if shard.spec.name not in self._kept]
        self._live = list({id(live): live for shard in shards for live in shard.live}.values())
        placements = [Placement.of_shards(shards)] if placements is None else placements
        super().__init__(name, rendezvous, hooks)
        try:
            self._ours = SendingRank(name, engine, shards, placements, rank, config, self.hooks)
        except BaseException:
            self.rendezvous.close()
            raise
        self._deadline_s, self._snapshot = config.deadline_s, self._ours.snapshot
        self._storing = VersionStoring(name, config.deadline_s)
        self._incarnation = secrets.token_hex(8)
        self._published = 0
        self._fence: Publication | None = None
        """The newest publication."""
        self._said_slow = False
        self._reading: list[Future[None]] = []
        """Unfinished sends of past sessions: the engine's calls may still read their memory."""
        self._queue = PublicationQueue(self._ours, self._closed)
        self._workers = [
            start_thread(f"weightlane-{kind}-{name}", self._on_own_stream, work)
            for kind, work in (("snapshot", self._take_snapshots), ("publish", self._send_versions))
        ]
        self.start()

    @property
    def busy(self) -> bool:
        """Whether the newest published version is neither sent nor aborted yet."""
        return self._queue.busy

    def publish(self, version: int) -> None:
        """Offer the parameters as they are now as `version`. Returns at once.

        The snapshot is taken in the background; call `fence` before any parameter changes. This version supersedes an earlier
        one that is not being sent yet. If an earlier one is being sent, the new snapshot waits for it, and so does the fence:
        check `busy` first. Every rank must publish the same versions in the same order.

        A version that was aborted may be published again, with other weights, on every rank: none sends what it published before.
        A rank that was started again does not know how often that was, so take a new number then.

        Raises `ClosedError` after `close`, `ConfigError` if `version` is not an integer from 0 on, and `ManifestError` if a
        parameter has moved to other memory since its shards were made.
        """
        version = checked_version(version, self.name)
        if self._closed.is_set():
            raise ClosedError("publish was called on a closed publisher.", part=self.name)
        for live in self._live:
            live.check()
        self._published += 1
        times = self._begin(version)
        identity = "" if self._ours.chooser is None else f"{self._incarnation}/{version}/{self._published}"
        publication = Publication(self._ours, version, times, self._published, identity)
        self._fence = publication
        superseded = self._queue.put(publication)
        if superseded is not None and superseded.version != version:
            self._report_superseded(superseded.version)

    def fence(self, names: Collection[str] | None = None) -> float:
        """Wait until the newest published version is copied, so that parameters may change. Returns the seconds waited.

        With `names` of checkpoint tensors, wait only for this rank's shards of these tensors: the others must not change yet.

        Raises `DeadlineExceededError` when the snapshot takes longer than the deadline, or the error that made it fail.
        """
        publication = self._fence
        if publication is None:
            return 0.0
        until = self._snapshot.read_end
        if names is not None:
            until = max((self._snapshot.ends.get(self._kept.get(name, name), 0) for name in names), default=0)
        started = time.perf_counter()
        publication.progress.wait_read(until, Deadline.after(self._deadline_s))
        seconds = time.perf_counter() - started
        if seconds > _NOTABLE_S and not self._said_slow:
            self._said_slow = True
            _log.warning(
                "%s: the optimizer waited %.2f s for the snapshot of version %d, since a snapshot takes longer than a forward"
                " and backward pass here; not logged again.",
                self.name,
                seconds,
                publication.version,
            )
        return seconds

    def wait_stored(self, version: int, timeout_s: float) -> None:
        """Block until an engine that stores versions has committed `version`, which serves, or a later one in its place.

        A version that is sent as a delta is not stored, and not waited for. Of several trainer ranks, rank 0 stores what all
        hold, and the others return at once. Raises the error of the commit, `DeadlineExceededError` or `ClosedError`.
        """
        if self._ours.gathers and self._ours.number != 0:
            return
        self._storing.wait(version, Deadline.after(timeout_s))

    def _free(self) -> None:
        self._queue.wake()
        for worker in self._workers:
            worker.join(JOIN_THREAD_S)
        self._storing.close()
        if self._fence is not None:  # its snapshot may never have begun
            self._fence.progress.fail(ClosedError("the publisher was closed.", part=self.name))
        snapshots = any(worker.is_alive() for worker in self._workers)
        if all(each.done() for each in self._reading) and not snapshots:
            self._free_memory()
            return
        _log.warning(
            "%s: %s; that memory is freed afterwards.",
            self.name,
            "a snapshot is still being taken"
            if snapshots
            else "the engine still reads the version that it was sending",
        )
        # From Python 3.12 on, an exiting program cannot start threads; the kernel frees its memory.
        with suppress(RuntimeError):
            start_thread(f"weightlane-free-{self.name}", self._free_memory)

    def _free_memory(self) -> None:
        """Wait until no thread reads the memory any more, and free all of it."""
        for worker in self._workers:
            worker.join()
        wait(self._reading)
        self._ours.close()

    # -- control thread -------------------------------------------------------------------------------------------------

    def _open_links(self) -> tuple[str, EngineTraits | None]:
        self._queue.open_session(SendSession(self._ours, self.session))
        return "", self._ours.traits

    def _connect_links(self, message: Connect, deadline: Deadline) -> SessionPlan:
        session = self._queue.session
        if session is None or session.name != message.session:  # this thread is late, and another session has begun
            raise ClosedError("the connection was closed while connecting.", part=self.name)
        return session.connect(self.rendezvous, message, deadline)

    def _connected(self) -> None:
        super()._connected()
        with self._turn:
            self._queue.session_ready(self.ready_session)

    def _close_links(self) -> None:
        session = self._queue.end_session()
        if session is None:
            return
        if session.pipeline is not None and session.pipeline.sending is not None:
            self._reading = [each for each in (*self._reading, session.pipeline.sending) if not each.done()]
        session.close()
        self._storing.afterwards(session.close_links)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Go):
            self._queue.go(message)
        elif isinstance(message, Full):
            self._queue.offer_in_full(message.version)

    def _aborted(self, version: int) -> None:
        self._queue.aborted(version)

    def _committed(self, version: int) -> None:
        publication = self._queue.committed(version)
        session = self._queue.session
        if session is None or session.pipeline is None or not self._ours.stores:
            return
        if publication is None or not publication.is_delta:
            self._storing.commit(version, session.pipeline.committing(version))
        else:
            self._storing.skip(version)

    # -- the other threads ----------------------------------------------------------------------------------------------

    def _on_own_stream(self, work: Callable[[], None]) -> None:
        """Run `work` on its own stream of the shards' device, where it waits for no other work.

        This holds for snapshots in host memory, too: pending blocks to be quantised are still on that device.
        """
        runtime = self._snapshot.runtime
        with runtime.on(runtime.stream_for(self)):
            work()

    def _take_snapshots(self) -> None:
        while (publication := self._queue.next_to_snapshot()) is not None:
            try:
                self._queue.take_snapshot(publication)
            except Exception as error:  # noqa: BLE001 - the fence raises it in the training thread
                ours = as_weightlane_error(error, self.name)
                self._queue.fail(publication, ours)
                self._report(publication.version, self.session, ours)

    def _send_versions(self) -> None:
        while (task := self._queue.next_to_send()) is not None:
            publication, session, go = task
            if go is not None and key_of(go) != publication.key:
                self._report_superseded(go.version)
                continue
            message: Message | None
            try:
                if go is None:
                    message = publication.offer(session)
                else:
                    message = publication.send(session, go)
                    self._queue.sent(publication.version)
                if message is not None:
                    self._tell(message)
            except Exception as error:  # noqa: BLE001 - the coordinator decides what becomes of the version
                cause = publication.progress.error or error
                what, level = ("offered", logging.WARNING) if go is None else ("sent", logging.INFO)
                _log.log(level, "%s: version %d could not be %s: %s", self.name, publication.version, what, cause)
                self._report(publication.version, session.name, cause)
            self._queue.sending_ended()

    def _report_superseded(self, version: int) -> None:
        error = SupersededError(f"version {version} was given up for a newer one.", part=self.name)
        self._report(version, self.session, error)
