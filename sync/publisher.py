"""`Publisher`: the trainer rank's end. Snapshots behind the optimizer's back, packs, checksums and sends.

On every trainer rank there is one. Each copies what it is to send into a snapshot, on one thread, and sends what is there already
on another: straight to the rollout ranks that need it. Engines that store get whole tensors from rank 0, to which the others
hand their pieces over a process group of their own that the training never uses. See `weightlane.sync.send.send_session`.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from typing import Any

from weightlane.ckpt_engines import (
    CheckpointEngine,
    ClosedError,
    Deadline,
    ProtocolError,
    SupersededError,
    Topology,
    WeightlaneError,
    as_weightlane_error,
)
from weightlane.ckpt_engines.runtime.at_exit import start_thread
from weightlane.plugins import RunHooks

from .codecs.codec_choice import CodecChooser
from .codecs.delta.encoding import DeltaEncoder
from .codecs.delta.format import TooDense
from .config import CodecPolicy, Integrity, Network, Quantise
from .control.messages import Connect, EngineTraits, Full, Go, Message, Offer, Sent
from .control.participant import JOIN_THREAD_S, Participant
from .control.rendezvous import RendezvousAddress
from .control.tensor_lists import TensorLists, scope_of
from .plan.session_plan import SessionPlan
from .send.agreement.magnitudes import complete
from .send.contribution import Contribution
from .send.publication import DeltaBase, Publication, SnapshotSlot, SnapshotSlots, checked_version
from .send.send_session import SendRequest, SendSession
from .send.send_sessions import SendSessions
from .send.snapshot.progress import Progress
from .send.version_storing import VersionStoring
from .version.manifest import CODEC_DELTA, CODEC_DENSE, DeltaSegment, Manifest
from .version.placement import Placement
from .version.tensor_spec import LocalShard

_log = logging.getLogger(__name__)
_LOOK_S = 0.5
_PATIENCE_S = 4.0
_PATIENCE_SNAPSHOTS = 10.0
"""How long, in seconds and in times of a snapshot, receivers may look at memory that is needed before other memory is taken:
loading and copying what they look at takes about as long as a snapshot, and several times that at first, when the memory that
it is copied to is new. Other memory costs as much."""
_NOTABLE_S = 0.05
"""A fence that takes longer is worth a line in the log, once."""


class Publisher(Participant):
    """Publishes weight versions of one trainer rank.

    The newest snapshot is kept until the next `publish`: it can be sent again, on another connection after a failure or to a
    replica that joins late. It is streamed while it is being taken, in memory of the engine and from there in place, unless it
    has to be gathered from several ranks.

    Args:
        name: This participant's name, e.g. ``"trainer-0"``.
        rendezvous: Where the run meets, as plain data or an address.
        shards: What this rank holds. Storage must stay in place; values are read between `publish` and the fence.
        engine: The transport.
        bucket_bytes: Payload of a bucket.
        rank: This rank among the trainer ranks, which all publish the same versions in the same order.
        placements: What each trainer rank holds, in rank order; by default there is one rank.
        deadline_s: Longest time the fence waits for a snapshot, in seconds.
        integrity: ``"full"`` to checksum every bucket, ``"off"`` to leave it to the transport.
        quantise: What linear weights are turned into; see `SyncConfig`.
        codec: What versions are sent as; see `SyncConfig`.
        full_every: With deltas, at the latest every so many versions one is sent in full.
        network: What links carry, the same on every rank: rollout ranks then hand versions on to one another where that is
            predicted to be sooner. By default nobody does.
        hooks: Observers; those of this process by default.

    Raises:
        StorageError: There is no room for the snapshot in the engine's memory.
        ManifestError: The ranks together do not hold every element, or this one not what its placement says.
        ConfigError: Nothing can be quantised, or not as it is sharded.
    """

    def __init__(
        self,
        name: str,
        rendezvous: RendezvousAddress | Mapping[str, Any],
        *,
        shards: Sequence[LocalShard],
        engine: CheckpointEngine,
        bucket_bytes: int,
        rank: int = 0,
        placements: Sequence[Placement] | None = None,
        deadline_s: float = 60.0,
        integrity: Integrity = "full",
        quantise: Quantise = "none",
        codec: CodecPolicy = "dense",
        full_every: int = 100,
        network: Network | None = None,
        hooks: RunHooks | None = None,
    ) -> None:
        held = [Placement.of_shards(shards)] if placements is None else placements
        self._rank, self._deadline_s = rank, deadline_s
        self._ours = ours = Contribution(held, rank, shards, quantise)
        self._end = SendSessions(
            name,
            rank,
            engine,
            ours,
            bucket_bytes=bucket_bytes,
            checksummed=integrity == "full",
            uses_deltas=codec != "dense",
            network=network,
        )
        self._snapshot = self._end.snapshot
        self._slots = SnapshotSlots(self._end.snapshot_memory, name)
        self._delta_memory = self._end.delta_memory()
        """What is encoded; grows."""
        self._encoder = DeltaEncoder(ours.held, self._end.places)
        self._chooser = CodecChooser(codec, ours.numel, self._encoder.dense_bytes, full_every)
        self._incarnation = secrets.token_hex(8)
        self._published = 0
        self._tensor_lists = TensorLists()
        self._storing = VersionStoring(name, deadline_s)
        super().__init__(name, rendezvous, hooks)
        self._changed = threading.Condition()
        self._next: Publication | None = None
        """Published, its snapshot not begun."""
        self._held: Publication | None = None
        """Whose snapshot the memory holds or is getting."""
        self._streaming = False
        """Whether the held version is being sent."""
        self._undecided = -1
        """The version that was sent and whose verdict has not come; nobody waits for that beyond `_decided_by`."""
        self._decided_by = 0.0
        self._snapshot_s = 0.0
        """How long the last one took."""
        self._offered_to = ""
        """The session in which the held version was offered."""
        self._go: Go | None = None
        self._unsent = -1
        """The newest published version while nobody has sent it or given it up."""
        self._fence: Publication | None = None
        self._said_slow = False
        self._proven = False
        """Whether the last version whose end is known has committed."""
        self._workers = [
            start_thread(f"weightlane-{kind}-{name}", target)
            for kind, target in (("snapshot", self._take_all), ("publish", self._run))
        ]
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

        Raises `ClosedError` after `close`, and `ConfigError` for a `version` that is no whole number from 0.
        """
        version = checked_version(version, self.name)
        if self._closed.is_set():
            raise ClosedError("publish was called on a closed publisher.", part=self.name)
        progress = Progress(f"the snapshot of version {version}", self.name)
        self._published += 1  # a version that was given up may be published again, with other weights
        identity = f"{self._incarnation}/{version}/{self._published}" if self._chooser.uses_deltas else ""
        publication = Publication(version, identity, self._snapshot.mark(), progress, self._published)
        self._outcomes.begin(version)
        self._fence = publication
        with self._changed:
            given_up, self._next = self._next, publication
            self._unsent = version
            if self._held is not None and self._held.progress.error is not None:
                self._held = None  # nobody need hear of its failure any more, not even under the same number
            self._changed.notify_all()
        self._look_again()
        if given_up is not None and given_up.version != version:
            self._report_superseded(given_up.version)

    def fence(self, names: Collection[str] | None = None) -> float:
        """Wait until the newest published version is snapshot, so that parameters may change. Returns the seconds waited.

        With `names`, of checkpoint tensors, wait for what this rank holds of those alone: the others must not change yet.

        Raises `DeadlineExceededError` when the snapshot takes longer than the deadline, or what made it fail.
        """
        publication = self._fence
        if publication is None:
            return 0.0
        until = self._snapshot.read_end
        if names is not None:
            until = max((self._snapshot.ends.get(name, 0) for name in names), default=0)
        started = time.perf_counter()
        publication.progress.wait_read(until, Deadline.after(self._deadline_s))
        seconds = time.perf_counter() - started
        if seconds > _NOTABLE_S and not self._said_slow:
            self._said_slow = True
            _log.warning(
                "%s: the optimizer waited %.2f s for the snapshot of version %d, which is slower than a step here;"
                " not said again.",
                self.name,
                seconds,
                publication.version,
            )
        return seconds

    def wait(self, version: int, timeout_s: float) -> None:
        """Block until `version` serves; an engine that stores may still be storing it then.

        Raises `SyncAbortedError` with the reason everybody got.
        """
        self._outcomes.wait(version, Deadline.after(timeout_s), self.name)

    def _free(self) -> None:
        with self._changed:
            self._changed.notify_all()
        for worker in self._workers:
            worker.join(JOIN_THREAD_S)
        self._storing.close()
        if self._fence is not None:  # its snapshot may never have begun
            self._fence.progress.fail(ClosedError("the publisher was closed.", part=self.name))
        self._encoder.close()
        snapshots = any(worker.is_alive() for worker in self._workers)
        if all(each.done() for each in self._end.reading) and not snapshots:
            self._give_back()
            return
        _log.warning(
            "%s: %s; that memory is given back afterwards.",
            self.name,
            "a snapshot is still being taken" if snapshots else "the engine still reads what it was to send",
        )
        with suppress(
            RuntimeError
        ):  # From Python 3.12 on, a program that ends starts no threads, and its memory ends with it.
            start_thread(f"weightlane-free-{self.name}", self._give_back)

    def _give_back(self) -> None:
        """Give all memory back once nobody reads it any more."""
        for worker in self._workers:
            worker.join()
        wait(self._end.reading)
        self._slots.close()
        self._delta_memory.close()
        self._end.close()

    # -- control thread -------------------------------------------------------------------------------------------------

    def _open_half(self) -> tuple[dict[str, Any], EngineTraits | None]:
        return self._end.open(self.session)

    def _connect_half(self, message: Connect, topology: Topology, deadline: Deadline) -> SessionPlan | None:
        return self._end.connect(self.rendezvous, message, topology, deadline, self._sent)

    def _close_half(self) -> None:
        self._storing.afterwards(self._end.disconnect())
        with self._changed:
            self._go = None

    def _connected(self) -> None:
        super()._connected()
        with self._changed:  # there may be something to offer
            self._changed.notify_all()

    def _handle(self, message: Message) -> None:
        if isinstance(message, Go):
            with self._changed:
                self._go = message
                self._changed.notify_all()
        elif isinstance(message, Full):
            with self._changed:
                held = self._held
                if held is not None and held.version == message.version:
                    held.send_in_full("somebody lacks what a delta would apply to")
                    self._offered_to = ""
                    self._changed.notify_all()

    def _aborted(self, version: int) -> None:
        self._proven = False
        self._decided(version)

    def _committed(self, version: int) -> None:
        self._proven = True
        with self._changed:
            held = self._held
            if held is None or held.version != version:
                held = None
            elif self._chooser.uses_deltas and held.slot is not None:
                self._slots.base = DeltaBase(version, held.identity, held.slot)
        self._decided(version)
        self._chooser.committed(version)
        sending = self._end.sending
        if sending is None or sending.pipeline is None or not self._end.stores or (held is not None and held.is_delta):
            return
        self._storing.commit(version, sending.pipeline.committing(version))

    def _decided(self, version: int) -> None:
        self._settled(version)
        with self._changed:
            if self._undecided == version:
                self._undecided = -1
                self._changed.notify_all()

    def _settled(self, version: int) -> None:
        with self._changed:
            if self._unsent == version:
                self._unsent = -1

    # -- snapshot thread ------------------------------------------------------------------------------------------------

    def _take_all(self) -> None:
        runtime = self._snapshot.runtime
        with runtime.on(runtime.new_stream()):
            self._take_each()

    def _take_each(self) -> None:
        while True:
            with self._changed:
                while not self._closed.is_set() and not self._may_take():
                    self._changed.wait(None if self._undecided < 0 else _LOOK_S)
                if self._closed.is_set():
                    return
                publication, self._next = self._next, None
                assert publication is not None, "it was waited for"
                self._held, self._offered_to = None, ""
            self._look_again()
            with self._slots.writing:
                pass  # whoever is writing looked whether it is still wanted
            try:
                self._take(publication)
            except Exception as error:  # noqa: BLE001 - the fence raises it in the training thread
                ours = as_weightlane_error(error, self.name)
                publication.progress.fail(ours)
                self._report(publication.version, self.session, ours)
                with self._changed:
                    if self._next is None:  # later sessions shall hear of it, too
                        self._held = publication
                        self._changed.notify_all()
                self._look_again()

    def _may_take(self) -> bool:
        if self._next is None or self._streaming:
            return False
        # The verdict on the version before says what a delta can apply to.
        return not self._chooser.uses_deltas or self._undecided < 0 or time.monotonic() > self._decided_by

    def _take(self, publication: Publication) -> None:
        slot = self._slots.free()
        self._have_memory(slot)
        base = self._slots.base
        density = None
        if base is not None and self._chooser.wants_density:
            with self._snapshot.reading(publication.mark):
                density = self._encoder.sampled_density(base.slot.memory.data)
        publication.choice = self._chooser.choose(density, has_base=base is not None)
        if self._ours.replicas.needed:  # while no parameter changes
            with self._snapshot.reading(publication.mark):
                digests = self._ours.replicas.digests(publication.number, everything=not self._proven)
            publication.replica_digests = digests
        publication.slot, publication.base, publication.began = slot, base, time.perf_counter()
        with self._changed:  # it can be offered, and streamed as far as it is there
            self._held = publication
            self._changed.notify_all()
        self._snapshot.take(slot.memory.data, publication.mark, publication.progress, publication.remains)
        seconds = time.perf_counter() - publication.began
        self._snapshot_s = seconds
        self._chooser.snapshot_taken(seconds)
        facts = {"seconds": seconds, "nbytes": self._snapshot.nbytes, "participant": self.name}
        self.hooks.snapshot_taken(version=publication.version, facts=facts)

    def _have_memory(self, slot: SnapshotSlot) -> None:
        """See to it that nobody looks at the memory: wait for the receivers, or take other memory where they cannot say."""
        try:
            for session, version in slot.exposed:
                sending = self._end.sending
                if sending is None or sending.session != session or sending.pipeline is None:
                    raise ClosedError(f"session {session} is over.", part=self.name)
                patience_s = _PATIENCE_S + _PATIENCE_SNAPSHOTS * self._snapshot_s
                sending.pipeline.reclaim(version, Deadline.after(min(patience_s, self._deadline_s)))
        except WeightlaneError as error:
            if self._closed.is_set():
                raise
            _log.info("%s: other memory is taken, receivers may still look at the old: %s", self.name, error)
            slot.memory.renew()
        slot.exposed.clear()

    # -- publishing thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # Of the shards' device, also where snapshots are in host memory: what is left to be quantised is still on it.
        runtime = self._snapshot.runtime
        with runtime.on(runtime.new_stream()):  # what is encoded, packed and checksummed waits for no other work
            self._publish_each()

    def _publish_each(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed.is_set() or self._may_stream() or self._may_offer())
                if self._closed.is_set():
                    return
                go, held = None, self._held
                assert held is not None, "it was waited for"
                if self._may_stream():
                    go, self._go = self._go, None
                    if go is not None and go.version == held.version:
                        self._streaming, self._undecided = True, go.version
                        self._decided_by = time.monotonic() + go.deadline_s
            if go is None:
                self._offer(held)
            elif go.version < held.version:
                self._report_superseded(go.version)
            else:
                try:
                    self._stream(go, held)
                finally:
                    with self._changed:
                        self._streaming = False
                        self._changed.notify_all()

    def _may_stream(self) -> bool:
        # Another rank may have published, and the coordinator gone ahead, before this one.
        return self._go is not None and self._held is not None and self._go.version <= self._held.version

    def _may_offer(self) -> bool:
        return self._held is not None and bool(self.ready_session) and self._offered_to != self.ready_session

    def _offer(self, held: Publication) -> None:
        """Offer the held version in the present session; rank 0 speaks for all ranks."""
        with self._changed:
            session, sending = self.ready_session, self._end.sending
            if self._held is not held or sending is None or sending.session != session:
                return
            self._offered_to = session
        try:
            self._complete(held, sending, Deadline.after(self._deadline_s))
            if held.is_delta and held.encoded_for != sending.layout.layout_digest:
                self._encode(held, sending)
            if sending.agreement is not None:
                sending.agreement.say(held)
            if sending.replicas is not None:
                sending.replicas.say(held.version, held.replica_digests)
            if self._rank == 0:
                if sending.replicas is not None:
                    deadline = Deadline.after(self._deadline_s)
                    sending.replicas.hear(held.version, deadline, lambda: self._wanted(held))
                manifest, _ = self._manifest_of(held, sending, Deadline.after(self._deadline_s))
                if self._held is not held:
                    return  # encoding took so long that a newer version has come
                board = self.rendezvous.mailbox(scope_of(session))
                self._tell(
                    Offer(
                        name=self.name,
                        session=session,
                        version=held.version,
                        manifest=self._tensor_lists.referred_to(manifest.to_plain(), board, session),
                        reason=held.choice.reason,
                    )
                )
        except Exception as error:  # noqa: BLE001 - the coordinator, which waits for the offer, must learn it
            cause = held.progress.error or error
            _log.warning("%s: version %d could not be offered: %s", self.name, held.version, cause)
            self._report(held.version, session, cause)

    def _complete(self, held: Publication, sending: SendSession, deadline: Deadline) -> None:
        """See to it that the bytes of `held` depend on nobody else. Raises what its snapshot failed with, if it has."""
        if held.progress.error is not None:
            raise held.progress.error
        if self._ours.scheme:
            complete(
                held, self._snapshot, sending.magnitudes, deadline, lambda: self._wanted(held), self._slots.writing
            )

    def _look_again(self) -> None:
        """Let go whoever waits for other ranks to speak of a version that is not to be sent any more."""
        if (sending := self._end.sending) is not None:
            for talk in (sending.agreement, sending.magnitudes, sending.replicas):
                if talk is not None:
                    talk.look_again()

    def _wanted(self, held: Publication) -> bool:
        """Whether it is still what is to be sent, and can be."""
        return self._held is held and held.progress.error is None

    def _encode(self, held: Publication, sending: SendSession) -> None:
        """Compare the snapshot, as far as it is there, with the base; it is sent in full if too much has changed."""
        assert held.base is not None
        assert held.slot is not None
        deadline = Deadline.after(self._deadline_s)
        delta = self._encoder.encode(
            sending.parts,
            held.base.slot.memory.data,
            held.slot.memory.data,
            self._chooser.capacity_bytes,
            lambda until: held.progress.wait(until, deadline),
            lambda: held.progress.done_bytes >= self._snapshot.nbytes,
        )
        if isinstance(delta, TooDense):
            held.send_in_full(delta)
            return
        self._delta_memory.grow(delta.nbytes)
        delta.write_into(self._delta_memory.data[: delta.nbytes])
        held.delta, held.encoded_for = replace(delta, parts=()), sending.layout.layout_digest
        self._chooser.encoded(time.perf_counter() - held.began, delta.density)

    def _manifest_of(
        self, held: Publication, sending: SendSession, deadline: Deadline
    ) -> tuple[Manifest, list[tuple[DeltaSegment, ...]]]:
        """What the held version is sent as, if all ranks can, and of a delta the segments of each."""
        if held.is_delta and held.delta is not None and held.base is not None:
            segments = [held.delta.segments]
            if sending.agreement is not None:
                segments = sending.agreement.hear(held, deadline, lambda: self._wanted(held))
            if segments:
                return sending.delta(held, segments), segments
            held.send_in_full("another rank cannot send a delta")
        return sending.dense(held), []

    def _stream(self, go: Go, held: Publication) -> None:
        try:
            started, deadline = time.perf_counter(), Deadline.after(go.deadline_s)
            sending = self._sending_in(go.session)
            self._complete(held, sending, deadline)
            nbytes = self._send(go, held, sending, deadline)
            seconds = time.perf_counter() - started
            self._chooser.sent(go.version, go.codec, seconds)
            self._settled(go.version)
            error = held.remains.error.to_plain() if self._ours.scheme else None
            sent = Sent(
                name=self.name, session=go.session, version=go.version, nbytes=nbytes, seconds=seconds, error=error
            )
            self._tell(sent)
        except Exception as error:  # noqa: BLE001 - the coordinator decides what becomes of the version
            cause = held.progress.error or error
            _log.info("%s: version %d was not sent: %s", self.name, go.version, cause)
            self._report(go.version, go.session, cause)

    def _report_superseded(self, version: int) -> None:
        error = SupersededError(f"version {version} was given up for a newer one.", part=self.name)
        self._report(version, self.session, error)

    def _sending_in(self, session: str) -> SendSession:
        """What is sent through; `ClosedError` if another session has begun."""
        sending = self._end.sending
        if sending is None or sending.session != session:
            raise ClosedError("the connection was closed before the version was sent.", part=self.name)
        return sending

    def _send(self, go: Go, held: Publication, sending: SendSession, deadline: Deadline) -> int:
        assert held.slot is not None, "its snapshot has begun"
        memory, segments = held.slot.memory.data, list[tuple[DeltaSegment, ...]]()
        if go.codec == CODEC_DELTA:
            manifest, segments = self._manifest_of(held, sending, deadline)
            memory = self._delta_memory.data
        else:
            manifest = sending.dense(held)
        if manifest.codec != go.codec:
            raise ProtocolError(f"version {go.version} is not held as {go.codec} any more.", part=self.name)

        def ready(until_bytes: int) -> None:
            if go.codec == CODEC_DENSE:
                held.progress.wait(until_bytes, deadline)

        if manifest.lasting:
            held.slot.exposed.add((sending.session, go.version))
        return sending.send(SendRequest(manifest, segments, memory, ready, go.receivers, deadline, go.stall_s))

    def _sent(self, version: int, index: int, nbytes: int, seconds: float) -> None:
        facts = {"seconds": seconds, "nbytes": nbytes, "participant": self.name}
        self.hooks.bucket_sent(version=version, index=index, facts=facts)
