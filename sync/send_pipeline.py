"""Double buffering on the sending rank: while the engine sends one bucket, the next one is made ready and sealed."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

from weightlane.ckpt_engines import Bucket, ClosedError, Deadline, Mailbox, Topology, WeightSender

from .bucket_source import BucketSource
from .daemon_threads import DaemonThreads
from .engine_calls import result_of
from .manifest import Manifest
from .seal import SEALS_FILE, SealMail, seal, seals_document
from .version_files import version_files

IN_FLIGHT = 2
"""How many buckets are in the engine's hands or next to be."""
_PART = "send pipeline"

OnSent = Callable[[int, int, int, float], None]
"""Told of every sent bucket: version, index, bytes, seconds."""


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a bucket goes."""

    sender: WeightSender
    receivers: Sequence[str]

    def send(self, bucket: Bucket, deadline: Deadline, on_sent: OnSent | None = None) -> None:
        """Send a bucket there, and tell `on_sent`. Raises what the engine raises."""
        started = time.perf_counter()
        self.sender.send(bucket, self.receivers, deadline)
        if on_sent is not None:
            on_sent(bucket.version, bucket.index, bucket.nbytes, time.perf_counter() - started)


class SendPipeline:
    """Sends versions through a rank's engine senders, which are called one call at a time.

    Args:
        session: Name of the connection.
        senders: The engine's halves; closed by their owner. Of an engine that stores there is one.
        seals: Where receivers look for seals.
        on_sent: Called on the pipeline's thread.
    """

    def __init__(
        self, session: str, senders: Sequence[WeightSender], seals: SealMail, on_sent: OnSent | None = None
    ) -> None:
        self.session = session
        self._senders = list(senders)
        self._mail = seals
        self._on_sent = on_sent
        self._seals: dict[int, list[str]] = {}
        """Of versions that may be committed, with a persistent engine."""
        self._thread = DaemonThreads(1, "weightlane-send")
        self._turn = threading.Lock()
        """Held while an engine's half that stores is called: one call at a time."""

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        """Connect the sender, if there is but one."""
        (sender,) = self._senders
        connecting = self._thread.submit(sender.connect, topology, mailbox, deadline)
        result_of(connecting, deadline, "the engine to connect", _PART)

    def send_version(
        self,
        manifest: Manifest,
        source: BucketSource,
        deadline: Deadline,
        *,
        destinations: Callable[[int], Destination],
        buckets: Iterable[int] | None = None,
        stall_s: float = float("inf"),
    ) -> int:
        """Seal and send `buckets` of `manifest`, by default all, each to where `destinations` says; returns the bytes sent.

        A bucket that goes to nobody is not sent. If files hold whole tensors, the engine is a persistent one, and told of
        every version that is sent in full. No bucket may take longer than `stall_s` seconds. Raises what the engine or the
        source raises.
        """
        version = manifest.version
        opened = self._thread.submit(self._open_version, manifest, deadline)
        sending: deque[Future[None]] = deque()
        seals: list[str] = []
        total = 0
        for index in range(manifest.bucket_count) if buckets is None else buckets:
            destination = destinations(index)
            if not destination.receivers and not _is_stored(manifest):
                continue
            while len(sending) >= IN_FLIGHT:
                self._end(sending.popleft(), deadline.within(stall_s), version)
            data = source.bucket(index)
            if manifest.sealed:
                seals.append(seal(data))
                self._mail.put(version, index, seals[-1])
            self._end(opened, deadline, version)
            bucket = Bucket(version, index, data, manifest.lasting, manifest.part(index))
            sending.append(self._thread.submit(self._send, bucket, destination, deadline, stall_s))
            total += data.numel()
        for future in sending:
            self._end(future, deadline.within(stall_s), version)
        self._end(opened, deadline, version)
        if _is_stored(manifest) and manifest.sealed:
            self._seals = {other: kept for other, kept in self._seals.items() if other > version - IN_FLIGHT}
            self._seals[version] = seals
        return total

    def _end(self, call: Future[None], deadline: Deadline, version: int) -> None:
        result_of(call, deadline, f"the engine to send version {version}", _PART)

    def _open_version(self, manifest: Manifest, deadline: Deadline) -> None:
        if _is_stored(manifest):
            (sender,) = self._senders
            with self._turn:
                sender.open_version(version_files(manifest), deadline)

    def _send(self, bucket: Bucket, to: Destination, deadline: Deadline, stall_s: float) -> None:
        with self._turn:
            to.send(bucket, deadline.within(stall_s), self._on_sent)

    def commit_version(self, version: int, deadline: Deadline) -> None:
        """`version` serves: readers of a store find it from now on. Raises what the engine raises.

        Unlike sending it goes on when the pipeline is closed meanwhile.
        """
        seals = self._seals.get(version)
        documents = {} if seals is None else {SEALS_FILE: seals_document(seals)}
        (sender,) = self._senders
        what = f"version {version} to be committed"

        def commit() -> None:
            if not self._turn.acquire(timeout=deadline.remaining_s):
                raise deadline.error(f"{what} after what is being sent", part=_PART)
            try:
                sender.commit_version(version, documents, deadline)
            finally:
                self._turn.release()

        thread = DaemonThreads(1, "weightlane-commit")
        committing = thread.submit(commit)
        thread.shutdown()
        result_of(committing, deadline, what, _PART)

    def reclaim(self, version: int, deadline: Deadline) -> None:
        """Return once no receiver looks at lasting buckets of `version`. Raises what the engine raises."""

        def reclaim() -> None:
            for sender in self._senders:
                sender.reclaim(version, deadline)

        self._wait_for(f"version {version} to be given back", reclaim, deadline)

    def _wait_for(self, what: str, call: Callable[[], None], deadline: Deadline) -> None:
        closed = ClosedError(f"closed while waiting for {what}.", part=_PART)
        try:
            done = self._thread.submit(call)
        except RuntimeError as error:  # the executor takes nothing any more
            raise closed from error
        try:
            result_of(done, deadline, what, _PART)
        except CancelledError as error:
            raise closed from error

    def close(self) -> None:
        """Let the sending thread end; the senders themselves are closed by their owner. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def _is_stored(manifest: Manifest) -> bool:
    """Whether it is a version that readers of a store can find: a delta is of no use without its base."""
    return manifest.whole_tensors and not manifest.is_delta
