"""`Subscriber`: the rollout rank's end. Stages versions in the background while its process goes on generating."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from weightlane.ckpt_engines import (
    CheckpointEngineRegistry,
    ClosedError,
    CommitError,
    Deadline,
    ManifestError,
    ReceiverLink,
    StagingMemoryError,
    Topology,
    WeightlaneError,
)
from weightlane.ckpt_engines.links.bounded_calls import address_of, close_all
from weightlane.ckpt_engines.links.buffer_device import buffer_device
from weightlane.ckpt_engines.links.link import receiver_link
from weightlane.ckpt_engines.runtime.at_exit import start_thread
from weightlane.ckpt_engines.runtime.devices import HOST, runtime_of
from weightlane.plugins import RunHooks

from .codecs.delta.decoding import DeltaDecoding
from .codecs.delta.staged_delta import IncomingDelta, StagedDelta
from .codecs.quantised.restored import Restoring
from .control.engine_links import EngineLinks
from .control.messages import Accepted, Connect, EngineTraits, Message, Open, Ready, Staged
from .control.participant import Participant
from .control.rendezvous import RendezvousAddress
from .control.tensor_lists import TensorLists, scope_of
from .plan.session_plan import PlanExchange, SessionPlan
from .receive.links import BucketSender, ExpectedBucket, ReceiveLink, ReceiveSession
from .receive.live_stream import LiveStream
from .receive.receive_loop import ReceiveLoop, StageRequest
from .receive.relay import Relay
from .receive.staging import Staging, Stream, lacks_base, new_memory
from .version.bucket_checksums import StoredChecksums
from .version.expectation import Expectation, check_coverage
from .version.manifest import Manifest
from .version.placement import Placement

_log = logging.getLogger(__name__)
_RELEASE_S = 5.0

CommitMode = Literal["staged", "in_place"]
"""Whether a version in full is put aside until it is complete, or written into the live weights as it comes."""


_DELTA_BUCKETS = 2
"""How many buckets of a delta come through a link at a time: each takes memory beside what was decoded."""


@dataclass(frozen=True, slots=True)
class _Settle:
    """A version that was loaded, or about which the verdict has come."""

    version: int


class Subscriber(Participant):
    """Stages weight versions for one rollout rank.

    A control thread checks every offered manifest against `expectation` and answers; a staging thread receives the buckets
    into one buffer, or looks at them in the sender's memory where the engine can, and verifies each. Nothing touches the
    live model: whoever commits calls `take`, loads, and `release`. Where `staging_limit_bytes` leaves room for it, the version
    that serves is kept until the next one has committed: `take_previous` is what a failed commit is undone with.

    With `commit="in_place"` nothing is put aside: whoever commits writes what `take_stream` gives, one verified bucket after
    the other, while nothing else uses the weights.

    Args:
        name: This participant's name, e.g. ``"rollout-0/1"``.
        rendezvous: Where the run meets, as plain data or an address.
        backend: Name of the checkpoint engine.
        options: Options of that engine.
        expectation: The tensors this rank's model is made of.
        needed: The slices of tensors that this rank needs; by default, and of tensors that are not named, everything.
        staging_limit_bytes: Most memory staged versions may take together; 0 means no limit.
        commit: How versions in full are taken; deltas are staged in any case.
        device: Device of the live model; staging stays on it if the engine can deliver there, else on the CPU.
        hooks: Observers; those of this process by default.
    """

    def __init__(
        self,
        name: str,
        rendezvous: RendezvousAddress | Mapping[str, Any],
        backend: str,
        options: Mapping[str, Any],
        expectation: Expectation,
        *,
        needed: Placement | None = None,
        staging_limit_bytes: int = 0,
        commit: CommitMode = "staged",
        device: torch.device | None = None,
        hooks: RunHooks | None = None,
    ) -> None:
        engine = CheckpointEngineRegistry().create(backend, options)
        super().__init__(name, rendezvous, hooks)
        self._engine = engine
        self._expectation = expectation
        self._needed = needed
        self._limit = staging_limit_bytes
        self._device = buffer_device(engine, device, name)
        self._live_runtime = runtime_of(device or HOST)
        self._staging = Staging(name, staging_limit_bytes, self._device, self._hand_out, self._live_runtime)
        self._in_place = commit == "in_place"
        self._bucket = torch.empty(0, dtype=torch.uint8, device=self._device)
        """What buckets are received into that are not staged; the staging thread's."""
        self._stream: LiveStream | None = None
        """The newest version that is taken in place."""
        self._decoding_stream = self._live_runtime.new_stream()
        self._receiver: ReceiverLink | None = None
        """Where one sender has everything."""
        self._halves: EngineLinks | None = None
        """Where every trainer rank sends, and other rollout ranks hand on."""
        self._receiving: ReceiveSession | None = None
        """There while the session is up."""
        self._intake = ReceiveLoop(name, self._device, self.hooks)
        self._tensor_lists = TensorLists()
        self._manifest: Manifest | None = None
        """The newest that was offered."""
        self._restorings: tuple[Manifest, Restoring] | None = None
        """How tensors of a manifest are handed out, and those of all that are like it."""
        self._shown: dict[int, ReceiveSession] = {}
        """Versions that are looked at in their sender's memory; the staging thread's."""
        self.prepare_delta: Callable[[IncomingDelta], Any] | None = None
        """Set by whoever commits, between two versions, if deltas can be put straight into the live weights.

        Called on a thread of its own with each delta, when its first bytes are to come, to do beforehand what can be done while
        the live weights stay as they are; `take_delta` gives what it returns, once everything has arrived and was verified.
        Without it deltas are applied to the copy of the version that serves, and `take` gives the whole.
        """
        self._delta: tuple[int, Any] | None = None
        """Version of the staged delta that is for the live weights, and what was prepared."""
        self._live = self._live_before = ""
        """Which publication the live weights are, and were before the last `take`; empty when that is not certain."""
        self._staged_identity = (-1, "")
        self._jobs: queue.SimpleQueue[StageRequest | _Settle | None] = queue.SimpleQueue()
        self._worker = start_thread(f"weightlane-stage-{name}", self._run)
        self.start()

    def take(self, version: int) -> Mapping[str, torch.Tensor]:
        """The staged, verified tensors of `version` by name: views of memory that must not be written to, valid until `release`.

        Where weights came quantised and the expectation is of others, these are what they stand for, each made when it is
        asked for.

        Raises `SyncAbortedError` if the version was given up, or `CommitError` if it is not staged.
        """
        try:
            tensors = self._staging.take(version)
        except CommitError:
            if failure := self._outcomes.failure(version):
                raise failure from None
            raise
        self._live, self._live_before = "", self._live
        return tensors

    def take_stream(self, version: int) -> LiveStream | None:
        """The buckets of `version` for whoever writes them into the live weights; None when it is staged, or is not known here.

        Of what it gives only `LiveStream.begin` and `LiveStream.pieces` are for the caller. If nothing was written in the end,
        `restored` says so.

        Raises `SyncAbortedError` if the version was given up.
        """
        stream = self._stream
        if stream is None or stream.version != version:
            return None
        if failure := self._outcomes.failure(version):
            raise failure
        self._live, self._live_before = "", self._live
        return stream

    def take_delta(self, version: int) -> Any | None:
        """What `prepare_delta` made of the delta that turns the live weights into `version`; None when `take` has it in full."""
        delta = self._delta
        if delta is None or delta[0] != version:
            return None
        self._live, self._live_before = "", self._live
        return delta[1]

    def restored(self) -> None:
        """What was taken last was taken back: the live weights are, bit for bit, what they were before."""
        self._live = self._live_before

    def take_previous(self, version: int) -> tuple[int, Mapping[str, torch.Tensor]]:
        """The version that served before `version`, and its tensors as `take` gives them, valid until `release`.

        Raises `CommitError` when it is not kept: before the second version, or where memory allows one only.
        """
        return self._staging.take_previous(version)

    def release(self, version: int) -> None:
        """Whoever took `version` is done: its tensors must not be used any more."""
        self._staging.release(version)
        self._jobs.put(_Settle(version))

    def wait(self, version: int, timeout_s: float) -> None:
        """Block until `version` serves. Raises `SyncAbortedError` with the reason everybody got."""
        self._outcomes.wait(version, Deadline.after(timeout_s), self.name)

    def _free(self) -> None:
        self._jobs.put(None)
        self._give_stream_up("this participant was closed.")
        self._worker.join(5.0)
        self._bucket = self._bucket[:0].clone()
        self._staging.close()  # whoever keeps this object does not keep the versions
        self.prepare_delta = self._delta = None

    # -- control thread -------------------------------------------------------------------------------------------------

    def _open_half(self) -> tuple[dict[str, Any], EngineTraits | None]:
        if not self._engine.capabilities.persistent:
            self._halves = EngineLinks(self.name, self._engine, self._device, copied_to=self._live_runtime.device)
            return {}, None
        self._receiver = receiver_link(self._engine, self.name, self._device)
        return address_of(self._receiver, self.name), None

    def _said_need(self) -> str:
        return PlanExchange(self.rendezvous.mailbox(f"plan/{self.session}")).need(self._needed)

    @property
    def _can_relay(self) -> bool:
        # In place there is memory for one bucket, which is to be handed on and written at once: who is slow would stop both.
        return not self._in_place

    def _connect_half(self, message: Connect, topology: Topology, deadline: Deadline) -> SessionPlan | None:
        session = message.session
        with self._turn:  # this thread may be late, and another session begun
            current = self.session == session
            receiver, halves = (self._receiver, self._halves) if current else (None, None)
        planned: SessionPlan | None = None
        if receiver is not None:
            (sender,) = topology.senders
            checksums = StoredChecksums(self.rendezvous.mailbox(f"checksums/{session}"))
            receiving = ReceiveSession(session, (ReceiveLink({sender: BucketSender(receiver, sender)}),), checksums)
            receiver.connect(topology, deadline)
        elif halves is not None:
            board = PlanExchange(self.rendezvous.mailbox(f"plan/{session}"))
            supply = board.supplied(deadline)
            needed = board.needed(message.needs, supply, deadline)
            planned = SessionPlan(supply, needed, self._engine.capabilities, may_relay=message.relays)
            halves.connect(self.rendezvous, session, planned, deadline)
            receiving = ReceiveSession.by_plan(session, self.name, planned, halves)
        else:
            raise ClosedError("the connection was closed while connecting.", part=self.name)
        with self._turn:
            if self.session == session:
                self._receiving = receiving
        return planned

    def _close_half(self) -> None:
        receiver, halves = self._receiver, self._halves
        self._receiver = self._halves = self._receiving = None
        if halves is not None:
            halves.close()
        if receiver is not None:
            close_all([receiver], self.name)
        self._delta = None
        self._give_stream_up("the connection was closed.")
        self._staging.drop()

    def _give_stream_up(self, why: str, version: int | None = None) -> None:
        stream = self._stream
        if stream is not None and version in (None, stream.version):
            stream.fail(ClosedError(f"version {stream.version} was given up: {why}", part=self.name))

    def _aborted(self, version: int) -> None:
        self._give_stream_up("the coordinator aborted it.", version)
        self._staging.abort(version)
        if self._delta is not None and self._delta[0] == version:
            self._delta = None
        self._jobs.put(_Settle(version))

    def _committed(self, version: int) -> None:
        self._staging.commit(version)
        staged, identity = self._staged_identity
        self._live, self._live_before = (identity if staged == version else ""), ""
        if self._delta is not None and self._delta[0] == version:
            self._delta = None
        self._jobs.put(_Settle(version))

    def _handle(self, message: Message) -> None:
        if not isinstance(message, Open):
            return
        self._outcomes.begin(message.version, told=True)
        receiving = self._receiving
        if receiving is None:
            raise ClosedError("a version was offered on a closed connection.", part=self.name)
        deadline, stream = Deadline.after(message.deadline_s), None
        board = self.rendezvous.mailbox(scope_of(self.session))
        plain = self._tensor_lists.looked_up(message.manifest, board, deadline.within(message.stall_s))
        sent, manifest = receiving.manifest(plain, self._manifest)
        self._manifest = sent
        check_coverage(manifest, self._expectation, part=self.name, specs=self._restoring(manifest).specs)
        if manifest.is_delta:
            self._check_base(manifest)
        self._delta = None  # as `reserve`: what was staged before is dropped
        if self._in_place and self._restoring(manifest).restores:
            raise ManifestError(
                f"version {manifest.version} came quantised, and its weights cannot be restored in place.",
                part=self.name,
                hint='Set rollout.commit to "staged", or sync.quantise to "none".',
            )
        if self._in_place and not manifest.is_delta:
            self._check_room_for_bucket(manifest)
            self._give_stream_up("another one was offered.")
            self._stream = stream = LiveStream(manifest, self.name, deadline)
        else:
            self._staging.reserve(manifest, lent=self._looks_at(manifest))
        relaying = None
        if receiving.onward:
            relaying = Relay(receiving.onward, sent, deadline, message.stall_s, self.name, self._handed_on)
        self._jobs.put(StageRequest(manifest, sent, receiving, deadline, message.stall_s, stream, relaying))
        in_place = stream is not None
        self._tell(Accepted(name=self.name, session=self.session, version=message.version, in_place=in_place))

    def _check_room_for_bucket(self, manifest: Manifest) -> None:
        needed = 0 if self._looks_at(manifest) else manifest.largest_bucket_bytes
        if self._limit and needed > self._limit:
            raise StagingMemoryError(
                f"taking version {manifest.version} in place needs a bucket of {needed / 2**20:.1f} MiB,"
                f" {self._limit / 2**20:.1f} MiB are allowed.",
                part=self.name,
                hint="Lower sync.bucket_mib, or raise rollout.staging_limit_bytes.",
            )

    def _restoring(self, manifest: Manifest) -> Restoring:
        """How the version's tensors are handed out."""
        known = self._restorings
        if known is None or known[0].tensors is not manifest.tensors or known[0].quantised != manifest.quantised:
            known = self._restorings = (manifest, Restoring(manifest, self._expectation))
        return known[1]

    def _hand_out(self, manifest: Manifest, staged: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of the checkpoint, of those of the stream."""
        return self._restoring(manifest)(staged)

    def _check_base(self, manifest: Manifest) -> None:
        have = self._live if self.prepare_delta else self._staging.kept_identity(manifest.plan)
        if have != manifest.base_identity:
            raise lacks_base(manifest, self.name, have or "no known version")
        if self.prepare_delta:
            self._staging.forget_kept()  # exchanging values is what takes a delta back

    def _looks_at(self, manifest: Manifest) -> bool:
        """Whether the version stays in its sender's memory."""
        return manifest.lasting and self._engine.capabilities.views

    # -- staging thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        # What is done here waits for no decode step, and takes no memory that one may still be using.
        runtime = runtime_of(self._device)
        with runtime.on(runtime.new_stream()):
            self._run_jobs()

    def _run_jobs(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, _Settle):
                self._settle(job.version)
                continue
            manifest, session = job.manifest, job.receiving.session
            try:
                started = time.perf_counter()
                self._stage(job)
                seconds = time.perf_counter() - started
                nbytes = manifest.wire_bytes
                facts = {"seconds": seconds, "nbytes": nbytes, "participant": self.name}
                self.hooks.version_staged(version=manifest.version, facts=facts)
                staged = Staged(
                    name=self.name, session=session, version=manifest.version, nbytes=nbytes, seconds=seconds
                )
                self._tell(staged)
            except Exception as error:  # noqa: BLE001 - the coordinator decides what becomes of the version
                self._report(manifest.version, session, error)  # before whoever writes it learns of it, and tells, too
                if job.stream is not None:
                    job.stream.fail(error)

    def _stage(self, job: StageRequest) -> None:
        self._intake.settle(job.deadline)
        if job.stream is not None:
            self._pass_on(job, job.stream)
            return
        manifest, prepare = job.manifest, self.prepare_delta
        lent: Stream | None = None
        delta: Any = None
        if manifest.is_delta:
            delta = self._receive_delta(job, prepare or StagedDelta.of)
        elif self._looks_at(manifest):
            lent = self._look(job)
        else:
            self._receive(job)
        with self._turn:
            if job.receiving.session != self.session:
                return
            if not manifest.is_delta:
                self._staging.complete(manifest, lent)
            elif prepare:
                self._delta = manifest.version, delta
            else:
                self._staging.apply(delta)
            self._staged_identity = (manifest.version, manifest.identity)

    def _pass_on(self, job: StageRequest, stream: LiveStream) -> None:
        """Hand one bucket after the other to whoever writes it into the live weights; see `take_stream`."""
        manifest, receiving = job.manifest, job.receiving
        looks = self._looks_at(manifest)
        nbytes = 0 if looks else manifest.largest_bucket_bytes
        if looks:
            self._show_from(manifest.version, receiving)
        elif self._bucket.numel() < nbytes * len(receiving.sources):
            self._bucket = self._bucket[:0].clone()  # the old memory goes before the new one comes
            self._bucket = new_memory(nbytes * len(receiving.sources), self._device, self._live_runtime)
        # For each link: an engine that can only broadcast has several between the same two ranks.
        rooms = {source: self._bucket[at * nbytes :] for at, source in enumerate(receiving.sources)}
        ready = Ready(name=self.name, session=receiving.session, version=manifest.version)
        turn, told = threading.Lock(), False

        def write(arrival: ExpectedBucket, data: torch.Tensor) -> None:
            nonlocal told
            with turn:
                if not told:
                    told = True
                    self._tell(ready)
                stream.offer(arrival.index, data)

        def place(arrival: ExpectedBucket) -> torch.Tensor:
            return rooms[arrival.source][: job.length(arrival)]

        if looks:
            self._intake.view_all(job, write)
        else:  # a sender's bucket has to be written before its next one comes to the same place
            self._intake.receive_all(job, place, write, at_a_time=1, checksums_first=True)
        if not told:
            self._tell(ready)
        with self._turn:
            if receiving.session != self.session:
                raise ClosedError("the connection was closed.", part=self.name)
            stream.finish()
            self._staged_identity = (manifest.version, manifest.identity)
        if looks:
            self._settle(manifest.version)

    def _show_from(self, version: int, receiving: ReceiveSession) -> None:
        """`version` is looked at from now on."""
        # Of older sessions nothing can be given back: their senders take other memory.
        self._shown = {shown: other for shown, other in self._shown.items() if other.session == receiving.session}
        self._shown[version] = receiving

    def _receive(self, job: StageRequest) -> None:
        """Receive every bucket into memory of our own."""
        memory = self._staging.memory(job.manifest)

        def place(arrival: ExpectedBucket) -> torch.Tensor:
            start, stop = job.manifest.window(arrival.index)
            return memory[start:stop]

        self._intake.receive_all(job, place)

    def _receive_delta(self, job: StageRequest, prepare: Callable[[IncomingDelta], Any]) -> Any:
        """What `prepare` makes of a delta: each segment is decoded while the buckets behind it are on their way."""
        manifest = job.manifest
        # What is prepared may be on the live model's device, wherever buckets come to.
        runtime, stream = self._live_runtime, self._decoding_stream
        decoding = DeltaDecoding(manifest, prepare, job.deadline, self.name, runtime, stream)

        def place(arrival: ExpectedBucket) -> torch.Tensor:
            return self._staging.bucket(job.length(arrival))

        def decode(arrival: ExpectedBucket, data: torch.Tensor) -> None:
            decoding.arrived(arrival.index, data)

        try:
            self._intake.receive_all(job, place, decode, at_a_time=_DELTA_BUCKETS, checksums_first=True)
        except Exception as error:
            decoding.give_up(error)
            raise
        return decoding.result()

    def _look(self, job: StageRequest) -> Stream | None:
        """Look at every bucket; the stream where it lies, or None after copying it where a section is in pieces."""
        manifest = job.manifest
        self._show_from(manifest.version, job.receiving)
        shown: dict[int, torch.Tensor] = {}

        def look(arrival: ExpectedBucket, data: torch.Tensor) -> None:
            shown[arrival.index] = data

        self._intake.view_all(job, look)
        sections = [manifest.buckets_of(number) for number in range(manifest.section_count)]
        parts = [adjoined([shown[index] for index in section]) for section in sections]
        if all(part is not None for part in parts):
            starts = [manifest.bounds_of(number)[0] for number in range(len(parts))]
            return Stream([(start, part) for start, part in zip(starts, parts, strict=True) if part is not None])
        memory = self._staging.memory(manifest)
        for index, bucket in shown.items():
            start, stop = manifest.window(index)
            memory[start:stop].copy_(bucket)
        return None

    def _handed_on(self, version: int, index: int, nbytes: int, seconds: float) -> None:
        facts = {"seconds": seconds, "nbytes": nbytes, "participant": self.name, "relayed": True}
        self.hooks.bucket_sent(version=version, index=index, facts=facts)

    def _settle(self, version: int) -> None:
        """Give a version's memory back to its sender once nobody here looks at it."""
        try:
            scatters = self.prepare_delta is not None
            if not self._staging.settle(version, scatters=scatters) or version not in self._shown:
                return
            for source in self._shown.pop(version).sources:
                source.link.release(version, Deadline.after(_RELEASE_S))
        except WeightlaneError as error:
            _log.debug(
                "%s: version %d was not given back, its sender takes other memory: %s", self.name, version, error
            )
        except Exception:  # noqa: BLE001 - without this thread nothing would ever be staged again
            _log.exception("%s: version %d was not given back", self.name, version)


def adjoined(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """One view of `views`, 1-D uint8, if each begins where the one before ends in the same storage; else None."""
    if not views:
        return torch.empty(0, dtype=torch.uint8)
    first, total = views[0], sum(view.numel() for view in views)
    place, storage = first.storage_offset(), first.untyped_storage()
    for view in views:
        if view.untyped_storage().data_ptr() != storage.data_ptr() or view.storage_offset() != place:
            return None
        place += view.numel()
    return first.as_strided((total,), (1,), first.storage_offset())
