"""`Subscriber`: the rollout rank's end. Stages versions in the background while its process goes on generating."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngineRegistry,
    ClosedError,
    CommitError,
    Deadline,
    Topology,
    WeightReceiver,
)
from weightlane.plugins import RunHooks

from .coverage import Expectation, check_coverage
from .devices import buffer_device
from .manifest import Manifest
from .messages import Accepted, Connect, EngineTraits, Message, Open, Staged
from .participant import Participant
from .rendezvous import RendezvousAddress
from .staging import Staging
from .trailer import TRAILER_BYTES, verify


@dataclass(frozen=True, slots=True)
class _Job:
    manifest: Manifest
    session: str
    receiver: WeightReceiver
    sender: str
    deadline: Deadline
    stall_s: float


class Subscriber(Participant):
    """Stages weight versions for one rollout rank.

    A control thread checks every offered manifest against `expectation` and answers; a staging thread receives the buckets
    into one buffer and verifies each. Nothing touches the live model: whoever commits calls `take`, loads, and `release`.
    Where `staging_limit_bytes` allows two versions, the one that serves is kept until the next one has committed:
    `take_previous` is what a failed commit is undone with.

    Args:
        name: This participant's name, e.g. ``"rollout-0/1"``.
        rendezvous: Where the run meets, as plain data or an address.
        backend: Name of the checkpoint engine.
        options: Options of that engine.
        expectation: The tensors this rank's model is made of.
        staging_limit_bytes: Most memory staged versions may take together; 0 means no limit.
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
        staging_limit_bytes: int = 0,
        device: torch.device | None = None,
        hooks: RunHooks | None = None,
    ) -> None:
        engine = CheckpointEngineRegistry().create(backend, options)
        super().__init__(name, rendezvous, hooks)
        self._engine = engine
        self._expectation = expectation
        self._staging = Staging(name, staging_limit_bytes, buffer_device(engine, device))
        self._receiver: WeightReceiver | None = None
        self._sender = ""
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name=f"weightlane-stage-{name}", daemon=True)
        self._worker.start()
        self.start()

    def take(self, version: int) -> dict[str, torch.Tensor]:
        """The staged, verified tensors of `version` by name: views of the staging memory, valid until `release`.

        Raises `SyncAbortedError` if the version was given up, or `CommitError` if it is not staged.
        """
        try:
            return self._staging.take(version)
        except CommitError:
            if failure := self._outcomes.failure(version):
                raise failure from None
            raise

    def take_previous(self, version: int) -> tuple[int, dict[str, torch.Tensor]]:
        """The version that served before `version`, and its tensors as `take` gives them, valid until `release`.

        Raises `CommitError` when it is not kept: before the second version, or where memory allows one only.
        """
        return self._staging.take_previous(version)

    def release(self, version: int) -> None:
        """Whoever took `version` is done: its tensors must not be used any more."""
        self._staging.release(version)

    def wait(self, version: int, timeout_s: float) -> None:
        """Block until `version` serves. Raises `SyncAbortedError` with the reason everybody got."""
        self._outcomes.wait(version, Deadline.after(timeout_s), self.name)

    def close(self) -> None:
        """Stop staging; see `Participant.close`."""
        super().close()
        self._jobs.put(None)
        self._worker.join(5.0)

    # -- control thread -------------------------------------------------------------------------------------------------

    def _open_half(self) -> tuple[dict[str, Any], EngineTraits | None]:
        self._receiver = self._engine.make_receiver(self.name)
        return dict(self._receiver.address()), None

    def _connect_half(self, message: Connect, topology: Topology, deadline: Deadline) -> None:
        with self._turn:  # this thread may be late, and another session begun
            receiver = self._receiver if self.session == message.session else None
            if receiver is not None:
                (self._sender,) = topology.senders
        if receiver is None:
            raise ClosedError("the connection was closed while connecting.", part=self.name)
        receiver.connect(topology, self.rendezvous.mailbox(f"engine/{message.session}"), deadline)

    def _close_half(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        self._staging.drop()

    def _aborted(self, version: int) -> None:
        self._staging.abort(version)

    def _committed(self, version: int) -> None:
        self._staging.commit(version)

    def _handle(self, message: Message) -> None:
        if not isinstance(message, Open):
            return
        self._outcomes.begin(message.version)
        manifest = Manifest.from_plain(message.manifest)
        check_coverage(manifest, self._expectation, part=self.name)
        if self._receiver is None:
            raise ClosedError("a version was offered on a closed connection.", part=self.name)
        self._staging.reserve(manifest)
        deadline = Deadline.after(message.deadline_s)
        self._jobs.put(_Job(manifest, self.session, self._receiver, self._sender, deadline, message.stall_s))
        self._tell(Accepted(name=self.name, session=self.session, version=message.version))

    # -- staging thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            manifest = job.manifest
            try:
                started = time.perf_counter()
                self._receive(job)
                seconds = time.perf_counter() - started
                if job.session == self.session:
                    self._staging.complete(manifest)
                nbytes = manifest.total_bytes
                facts = {"seconds": seconds, "nbytes": nbytes, "participant": self.name}
                self.hooks.version_staged(version=manifest.version, facts=facts)
                staged = Staged(
                    name=self.name, session=job.session, version=manifest.version, nbytes=nbytes, seconds=seconds
                )
                self._tell(staged)
            except Exception as error:  # noqa: BLE001 - the coordinator decides what becomes of the version
                self._report(manifest.version, job.session, error)

    def _receive(self, job: _Job) -> None:
        manifest = job.manifest
        memory = self._staging.memory(manifest)
        for index in range(manifest.bucket_count):
            start, stop = manifest.window(index)
            # The trailer lands on the bytes that the next bucket's payload overwrites.
            framed = memory[start : stop + TRAILER_BYTES]
            started = time.perf_counter()
            bucket = Bucket(manifest.version, index, framed, TRAILER_BYTES)
            job.receiver.receive(bucket, job.sender, job.deadline.within(job.stall_s))
            verify(framed, manifest.version, index, peer=job.sender)
            facts = {"seconds": time.perf_counter() - started, "nbytes": stop - start, "participant": self.name}
            self.hooks.bucket_received(version=manifest.version, index=index, facts=facts)
