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
    StagingMemoryError,
    Topology,
    WeightReceiver,
)

from .coverage import Expectation, check_coverage
from .devices import buffer_device
from .manifest import Manifest
from .messages import Accepted, Connect, Message, Open, Staged
from .participant import Participant
from .rendezvous import RendezvousAddress
from .trailer import TRAILER_BYTES, verify


@dataclass(frozen=True, slots=True)
class _Job:
    manifest: Manifest
    session: str
    receiver: WeightReceiver
    sender: str
    deadline: Deadline


class Subscriber(Participant):
    """Stages weight versions for one rollout rank.

    A control thread checks every offered manifest against `expectation` and answers; a staging thread receives the buckets
    into one buffer and verifies each. Nothing touches the live model: whoever commits calls `take`, loads, and `release`.

    Args:
        name: This participant's name, e.g. ``"rollout-0/1"``.
        rendezvous: Where the run meets, as plain data or an address.
        backend: Name of the checkpoint engine.
        options: Options of that engine.
        expectation: The tensors this rank's model is made of.
        staging_limit_bytes: Most memory a staged version may take; 0 means no limit.
        device: Device of the live model; staging stays on it if the engine can deliver there, else on the CPU.
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
    ) -> None:
        engine = CheckpointEngineRegistry().create(backend, options)
        super().__init__(name, rendezvous)
        self._engine = engine
        self._expectation = expectation
        self._limit = staging_limit_bytes
        self._device = buffer_device(engine, device)
        self._receiver: WeightReceiver | None = None
        self._sender = ""
        self._staging = torch.empty(0, dtype=torch.uint8)
        self._staged: Manifest | None = None
        self._taken: int | None = None
        """The version whose tensors somebody is loading: its memory must not be filled again until `release`."""
        self._staging_lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._worker = threading.Thread(target=self._run, name=f"weightlane-stage-{name}", daemon=True)
        self._worker.start()
        self.start()

    def take(self, version: int) -> dict[str, torch.Tensor]:
        """The staged, verified tensors of `version` by name: views of the staging memory, valid until `release`.

        Raises `SyncAbortedError` if the version was given up, or `CommitError` if it is not staged.
        """
        with self._staging_lock:
            manifest = self._staged
            if manifest is not None and manifest.version == version:
                self._taken = version
        if manifest is None or manifest.version != version:
            failure = self._outcomes.failure(version)
            if failure is not None:
                raise failure
            have = "nothing" if manifest is None else f"version {manifest.version}"
            raise CommitError(
                f"version {version} is not staged here ({have} is).",
                part=self.name,
                hint="Commit a version only after the coordinator reports it staged.",
            )
        return {
            entry.spec.name: self._staging[entry.offset : entry.end].view(entry.spec.dtype).view(entry.spec.shape)
            for entry in manifest.entries
        }

    def release(self, version: int) -> None:
        """Give the staging memory of `version` back; its tensors must not be used any more."""
        with self._staging_lock:
            if self._taken == version:
                self._taken = None
            if self._staged is not None and self._staged.version == version:
                self._staged = None

    def wait(self, version: int, timeout_s: float) -> None:
        """Block until every replica serves `version`. Raises `SyncAbortedError` with the reason everybody got."""
        self._outcomes.wait(version, Deadline.after(timeout_s), self.name)

    def close(self) -> None:
        """Stop staging; see `Participant.close`."""
        super().close()
        self._jobs.put(None)
        self._worker.join(5.0)

    # -- control thread -------------------------------------------------------------------------------------------------

    def _open_half(self) -> dict[str, Any]:
        self._drop_staged()
        self._receiver = self._engine.make_receiver(self.name)
        return dict(self._receiver.address())

    def _connect_half(self, message: Connect, topology: Topology, deadline: Deadline) -> None:
        if self._receiver is None:
            raise ClosedError("the connection was closed while connecting.", part=self.name)
        (self._sender,) = topology.senders
        self._receiver.connect(topology, self.rendezvous.mailbox(f"engine/{message.session}"), deadline)

    def _close_half(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()
        self._drop_staged()

    def _drop_staged(self) -> None:
        with self._staging_lock:
            self._staged = None

    def _handle(self, message: Message) -> None:
        if not isinstance(message, Open):
            return
        self._outcomes.begin(message.version)
        manifest = Manifest.from_plain(message.manifest)
        check_coverage(manifest, self._expectation, part=self.name)
        self._check_memory(manifest)
        if self._receiver is None:
            raise ClosedError("a version was offered on a closed connection.", part=self.name)
        with self._staging_lock:
            if self._taken is not None:
                raise CommitError(
                    f"version {self._taken} is still being loaded here.",
                    part=self.name,
                    hint="Its commit outlived its deadline; the next version will be taken once it has ended.",
                )
        self._drop_staged()
        deadline = Deadline.after(message.deadline_s)
        self._jobs.put(_Job(manifest, self.session, self._receiver, self._sender, deadline))
        self._tell(Accepted(name=self.name, session=self.session, version=message.version))

    def _check_memory(self, manifest: Manifest) -> None:
        needed = manifest.total_bytes + TRAILER_BYTES
        if self._limit and needed > self._limit:
            raise StagingMemoryError(
                f"staging version {manifest.version} needs {needed / 2**20:.1f} MiB, {self._limit / 2**20:.1f} MiB are allowed.",
                part=self.name,
                hint="Raise rollout.staging_limit_bytes, or give the rollout less KV cache.",
            )

    # -- staging thread -------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                started = time.perf_counter()
                self._receive(job)
                seconds = time.perf_counter() - started
                if job.session == self.session:
                    with self._staging_lock:
                        self._staged = job.manifest
                self._tell(
                    Staged(
                        name=self.name,
                        session=job.session,
                        version=job.manifest.version,
                        nbytes=job.manifest.total_bytes,
                        seconds=seconds,
                    )
                )
            except Exception as error:  # noqa: BLE001 - the coordinator aborts the version with it on every side
                self._give_up(job.manifest.version, job.session, error)

    def _receive(self, job: _Job) -> None:
        manifest = job.manifest
        needed = manifest.total_bytes + TRAILER_BYTES
        if self._staging.numel() < needed or self._staging.device != self._device:
            # Filled once: first-touch page faults would otherwise land in the middle of the first version.
            self._staging = torch.zeros(needed, dtype=torch.uint8, device=self._device)
        for index in range(manifest.bucket_count):
            start, stop = manifest.window(index)
            # The trailer lands on the bytes that the next bucket's payload overwrites.
            framed = self._staging[start : stop + TRAILER_BYTES]
            job.receiver.receive(Bucket(manifest.version, index, framed), job.sender, job.deadline)
            verify(framed, manifest.version, index, peer=job.sender)
