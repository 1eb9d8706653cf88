"""`Subscriber`: the rollout rank's end of a run. It stages versions in the background while its process generates."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, get_args

import torch

from weightlane.ckpt_engines import (
    CheckpointEngineRegistry,
    ClosedError,
    CommitError,
    ConfigError,
    Deadline,
    ManifestError,
    ProtocolError,
    StagingMemoryError,
    WeightlaneError,
)
from weightlane.ckpt_engines.runtime.devices import HOST, buffer_device, runtime_of
from weightlane.ckpt_engines.runtime.threads import start_thread
from weightlane.plugins import RunHooks

from .codecs.delta.staged_delta import IncomingDelta
from .codecs.quantised.restored import RestorePlan
from .control.engine_links import EngineLinks
from .control.messages import Accepted, Connect, EngineTraits, Message, Open, Ready, Staged
from .control.participant import Participant
from .control.rendezvous import RendezvousAddress
from .plan.session_plan import PlanExchange, SessionPlan
from .receive.live_stream import LiveStream
from .receive.receive_session import ReceiveSession
from .receive.staging import Staging, lacks_base
from .receive.version_receiver import StageRequest, VersionReceiver
from .version.bucket_checksums import StoredChecksums
from .version.expectation import Expectation, check_coverage
from .version.manifest import Manifest
from .version.placement import Placement

_log = logging.getLogger(__name__)

CommitMode = Literal["staged", "in_place"]
"""How full versions are loaded: staged until they are complete, or written into the live weights bucket by bucket."""


class Subscriber(Participant):
    """Stages weight versions for one rollout rank.

    A control thread checks every offered manifest against `expectation` and answers. A staging thread receives the buckets into
    one buffer, or views them in the sender's memory if the engine can, and verifies each. The subscriber itself never changes
    the live model: to commit, its caller calls `take`, loads the tensors, and calls `release`. If `staging_limit_bytes` allows
    it, the version that serves is kept until the next commit, so that `take_previous` can undo a failed commit.

    With `commit="in_place"` full versions are not staged: the caller writes the verified buckets of `take_stream` one after
    another, while nothing else uses the weights.

    Args:
        name: This participant's name, e.g. ``"rollout-0/1"``.
        rendezvous: Address of the run's rendezvous, as an object or as plain data.
        backend: Name of the checkpoint engine.
        options: Options of that engine.
        expectation: The tensors of this rank's model.
        needed: The slices of tensors that this rank needs. By default, or if it names other tensors than those sent, the rank
            gets every tensor in full.
        staging_limit_bytes: Upper limit for the memory of all staged versions; 0 means no limit.
        commit: How full versions are loaded; deltas are always staged.
        device: Device of the live model. Versions are staged on it if the engine can deliver there, else on the CPU.
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
        if commit not in get_args(CommitMode):
            raise ConfigError(
                f"commit is {commit!r}, and can be {' or '.join(map(repr, get_args(CommitMode)))}.", part=name
            )
        engine = CheckpointEngineRegistry().create(backend, options)
        super().__init__(name, rendezvous, hooks)
        self._engine = engine
        self._expectation = expectation
        self._needed = needed
        self._limit = staging_limit_bytes
        self._in_place = commit == "in_place"
        self._device = buffer_device(engine.capabilities.devices, device, name)
        live = runtime_of(device or HOST)
        self._live = live
        self._staging = Staging(name, staging_limit_bytes, self._device, live)
        self._receiver = VersionReceiver(name, self._device, live, self._staging, self.hooks)
        self._links: EngineLinks | None = None
        """Set while there is a session."""
        self._receive_session: ReceiveSession | None = None
        """Set while the session is connected."""
        self._restoring: tuple[Manifest, RestorePlan] | None = None
        """The newest restore plan, with the manifest that it was made for."""
        self._stream: LiveStream | None = None
        """Stream of the in-place version that was offered last."""
        self.prepare_delta: Callable[[IncomingDelta], Any] | None = None
        """Prepares a delta for the live weights. Set between two versions by a caller that can apply deltas to them directly.

        Called on its own thread with each delta, just before its first bytes arrive, for work that leaves the live weights
        unchanged. `take_delta` returns the result once the full delta was verified. Without `prepare_delta`, deltas are applied
        to the kept copy of the version that serves, and `take` returns the full version.
        """
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        """Calls for the staging thread; None ends it."""
        self._staging_thread = start_thread(f"weightlane-stage-{name}", self._run_calls)
        self.start()

    def take(self, version: int) -> Mapping[str, torch.Tensor]:
        """The staged, verified tensors of `version` by name: read-only views, valid until `release`.

        Quantised weights are restored on access where the expectation names the original tensors.

        Raises `SyncAbortedError` if the version was aborted, or `CommitError` if it is not staged.
        """
        try:
            manifest, staged = self._staging.take(version)
        except CommitError:
            if failure := self._failure_of(version):
                raise failure from None
            raise
        return self._loaded(manifest, staged)

    def take_stream(self, version: int) -> LiveStream | None:
        """The stream of `version` to write into the live weights; None if the version is staged, or not known here.

        The caller uses `LiveStream.begin` and `LiveStream.parts`, and calls `restored` if it has written nothing.

        Raises `SyncAbortedError` if the version was aborted.
        """
        stream = self._stream
        if stream is None or stream.version != version:
            return None
        if failure := self._failure_of(version):
            raise failure
        self._staging.write_live()
        return stream

    def take_delta(self, version: int) -> Any | None:
        """The result of `prepare_delta` for the delta to `version`; None if `take` has the full version."""
        delta = self._staging.prepared_delta(version)
        if delta is not None:
            self._staging.write_live()
        return delta

    def restored(self) -> None:
        """Report that the live weights are, bit for bit, the same as before the last `take`, `take_stream` or `take_delta`."""
        self._staging.restore_live()

    def lost(self) -> None:
        """Report that the live weights are gone: no delta applies to them, and none is prepared."""
        self.prepare_delta = None
        self._staging.lose_live()

    def take_previous(self, version: int) -> tuple[int, Mapping[str, torch.Tensor]]:
        """The version that served before `version`, and its tensors as from `take`, valid until `release`.

        Raises `CommitError` if it is not kept: before the second version, or if there is memory for one version only.
        """
        manifest, kept = self._staging.take_previous(version)
        return manifest.version, self._loaded(manifest, kept)

    def release(self, version: int) -> None:
        """End the use of the tensors of `version` that `take` or `take_previous` returned."""
        self._staging.release(version)
        self._clean_up_soon(version)

    def _free(self) -> None:
        self._calls.put(None)
        self._give_stream_up("this participant was closed.")
        self._staging_thread.join(5.0)
        self._receiver.free_buffer()
        self._staging.close()  # this object may outlive its use
        self.prepare_delta = None

    # -- control thread -------------------------------------------------------------------------------------------------

    def _open_links(self) -> tuple[str, EngineTraits | None]:
        self._links = EngineLinks(self.name, self._engine, self._device, copied_to=self._live.device)
        exchange = PlanExchange(self.rendezvous.mailbox(f"plan/{self.session}"))
        return exchange.need(None if self._engine.capabilities.persistent else self._needed), None

    def _connect_links(self, message: Connect, deadline: Deadline) -> SessionPlan:
        session, checksums = message.session, None
        with self._turn:  # another session may have begun before this thread ran
            links = self._links if self.session == session else None
        if links is None:
            raise ClosedError("the connection was closed while connecting.", part=self.name)
        if self.name not in message.needs:  # it would receive nothing, and take its empty memory for a version
            raise ProtocolError(f"session {session} has no plan for {self.name}.", part=self.name)
        exchange = PlanExchange(self.rendezvous.mailbox(f"plan/{session}"))
        supply = exchange.supplied(deadline)
        planned = SessionPlan.of(supply, exchange.needed(message.needs, supply, deadline), self._engine.capabilities)
        if self._in_place and planned.relays:
            # There is memory for one bucket. If it were relayed and written at once, the slower of the two would block both.
            raise ManifestError(
                f"sync.relay is {supply.relay}, and a rollout that is written in place cannot relay.",
                part=self.name,
                hint='Set rollout.commit to "staged", or sync.relay to "off".',
            )
        specs = RestorePlan(planned.layout, self._expectation).specs
        check_coverage(planned.layout, self._expectation, part=self.name, specs=specs)
        links.connect(self.rendezvous, session, planned, deadline)
        if self._engine.capabilities.persistent:
            checksums = StoredChecksums(self.rendezvous.mailbox(f"checksums/{session}"))
        receive_session = ReceiveSession(session, self.name, planned, links, checksums)
        with self._turn:
            if self.session == session:
                self._receive_session = receive_session
        return planned

    def _close_links(self) -> None:
        links, self._links, self._receive_session = self._links, None, None
        if links is not None:
            links.close()
        self._give_stream_up("the connection was closed.")
        self._staging.drop()

    def _give_stream_up(self, why: str, version: int | None = None) -> None:
        stream = self._stream
        if stream is not None and version in (None, stream.version):
            stream.fail(ClosedError(f"version {stream.version} was given up: {why}", part=self.name))

    def _aborted(self, version: int) -> None:
        self._give_stream_up("the coordinator aborted it.", version)
        self._staging.abort(version)
        self._clean_up_soon(version)

    def _committed(self, version: int) -> None:
        self._staging.commit(version)
        self._clean_up_soon(version)

    def _handle(self, message: Message) -> None:
        if isinstance(message, Open):
            self._begin(message.version, told=True)
            request = self._checked(message)
            self._calls.put(partial(self._stage, request))
            in_place = request.stream is not None
            self._tell(Accepted(name=self.name, session=self.session, version=message.version, in_place=in_place))

    def _checked(self, message: Open) -> StageRequest:
        """Check the offered version, whose tensors were checked when the session connected, against what this rank has room for.

        Raises an error if it must be refused.
        """
        session = self._receive_session
        if session is None:
            raise ClosedError("a version was offered on a closed connection.", part=self.name)
        deadline, stall_s = Deadline.after(message.deadline_s), message.stall_s
        sent, manifest = session.manifest(message.manifest)
        prepare_delta, stream = self.prepare_delta, None
        if manifest.is_delta:
            self._check_base(manifest, live=prepare_delta is not None)
        self._staging.forget_prepared()  # `reserve` drops other versions that are not committed
        viewed = manifest.lasting and self._engine.capabilities.views
        if self._in_place and manifest.quantised and self._restoring_of(manifest).restores:
            raise ManifestError(
                f"version {manifest.version} is quantised, and its weights cannot be restored in place.",
                part=self.name,
                hint='Set rollout.commit to "staged", or sync.quantise to "none".',
            )
        if self._in_place and not manifest.is_delta:
            self._check_bucket_limit(0 if viewed else session.live_bytes(manifest), manifest.version)
            self._give_stream_up("another version was offered.")
            ready = Ready(name=self.name, session=session.name, version=manifest.version)
            self._stream = stream = LiveStream(manifest, self.name, deadline, partial(self._tell, ready), self._live)
        else:
            self._staging.reserve(manifest, viewed=viewed, live=prepare_delta is not None)
        return StageRequest(manifest, sent, session, deadline, stall_s, viewed, stream, prepare_delta)

    def _check_base(self, manifest: Manifest, *, live: bool) -> None:
        """Raise `DeltaBaseError` unless the base of a delta is kept here; for `live` weights, unless they hold the base."""
        have = self._staging.live_identity if live else self._staging.kept_identity(manifest.plan)
        if have != manifest.base_identity:
            raise lacks_base(manifest, self.name, have or "no known version")
        if live:
            self._staging.forget_kept()  # no copy is needed: swapping elements back undoes a delta

    def _check_bucket_limit(self, needed: int, version: int) -> None:
        if self._limit and needed > self._limit:
            raise StagingMemoryError(
                f"taking version {version} in place needs a bucket of each sender, {needed / 2**20:.1f} MiB,"
                f" {self._limit / 2**20:.1f} MiB are allowed.",
                part=self.name,
                hint="Lower sync.bucket_mib, or raise rollout.staging_limit_bytes.",
            )

    def _loaded(self, manifest: Manifest, staged: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        return self._restoring_of(manifest)(staged) if manifest.quantised else manifest.loaded(staged)

    def _restoring_of(self, manifest: Manifest) -> RestorePlan:
        """The restore plan of a version; the same object for versions with the same tensors and quantisation."""
        known = self._restoring
        if known is None or known[0].tensors is not manifest.tensors or known[0].quantised != manifest.quantised:
            known = self._restoring = (manifest, RestorePlan(manifest, self._expectation))
        return known[1]

    # -- staging thread -------------------------------------------------------------------------------------------------

    def _run_calls(self) -> None:
        # On its own stream, staging waits for no decode step, and reuses no memory that a decode step may still be using.
        runtime = runtime_of(self._device)
        with runtime.on(runtime.stream_for(self)):
            while (call := self._calls.get()) is not None:
                call()

    def _stage(self, request: StageRequest) -> None:
        """Receive one version, and report to the coordinator that it is staged, or the error."""
        version, session, nbytes = request.manifest.version, request.session.name, request.manifest.wire_bytes
        started = time.perf_counter()
        try:
            self._receive(request)
            seconds = time.perf_counter() - started
            facts = {"seconds": seconds, "nbytes": nbytes, "participant": self.name}
            self.hooks.version_staged(version=version, facts=facts)
            self._tell(Staged(name=self.name, session=session, version=version, nbytes=nbytes, seconds=seconds))
        except Exception as error:  # noqa: BLE001 - the coordinator decides what becomes of the version
            self._report(version, session, error)  # before the writer of the stream fails, and reports, too
            if request.stream is not None:
                request.stream.fail(error)

    def _receive(self, request: StageRequest) -> None:
        stage = self._receiver.receive(request)
        with self._turn:
            if request.session.name != self.session:
                raise ClosedError("the connection was closed.", part=self.name)
            stage()
            self._staging.note_staged(request.manifest)
        if request.stream is not None and request.viewed:
            self._clean_up(request.manifest.version)

    def _clean_up_soon(self, version: int) -> None:
        self._calls.put(partial(self._clean_up, version))

    def _clean_up(self, version: int) -> None:
        """Release the memory of `version` on its senders once nothing here needs it."""
        try:
            if self._staging.clean_up(version, keep=self.prepare_delta is None):
                self._receiver.release(version)
        except WeightlaneError as error:
            _log.debug(
                "%s: version %d was not released, its sender allocates other memory: %s", self.name, version, error
            )
        except Exception:  # noqa: BLE001 - nothing more would be staged if this thread ended
            _log.exception("%s: version %d was not released", self.name, version)
