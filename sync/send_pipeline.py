"""Double buffering on the sending rank: while the engine sends one bucket, the next one is made ready and sealed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace

from weightlane.ckpt_engines import Bucket, ClosedError, Deadline, Mailbox, Topology, WeightlaneError, WeightSender

from .bucket_source import BucketSource
from .manifest import Manifest
from .seal import SEALS_FILE, SealMail, seal, seals_document
from .version_files import version_files

IN_FLIGHT = 2
"""How many buckets are in the engine's hands or next to be."""
_PART = "send pipeline"

OnSent = Callable[[int, int, int, float], None]
"""Told of every sent bucket: version, index, bytes, seconds."""


class SendPipeline:
    """Sends versions through one engine sender, which is called from one thread of this pipeline only.

    Args:
        session: Name of the connection.
        sender: The engine's half; closed by its owner.
        layout: The stream, and whether its buckets are sealed and lasting. If they hold whole tensors, the engine is a
            persistent one, and told of every version.
        receivers: Everybody who is connected.
        seals: Where receivers look for seals.
        on_sent: Called on the pipeline's thread.
    """

    def __init__(
        self,
        session: str,
        sender: WeightSender,
        layout: Manifest,
        receivers: Sequence[str],
        seals: SealMail,
        on_sent: OnSent | None = None,
    ) -> None:
        self.session = session
        self._sender = sender
        self._layout = layout
        self._receivers = receivers
        self._mail = seals
        self._on_sent = on_sent
        self._seals: dict[int, list[str]] = {}
        """Of versions that may be committed, with a persistent engine."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weightlane-send")

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        """Connect the sender."""
        self._thread.submit(self._sender.connect, topology, mailbox, deadline).result()

    def send_version(
        self,
        version: int,
        source: BucketSource,
        deadline: Deadline,
        *,
        receivers: Sequence[str] | None = None,
        stall_s: float = float("inf"),
    ) -> int:
        """Seal and send every bucket of `version` to `receivers`, everybody by default; returns the bytes sent.

        No bucket may take longer than `stall_s` seconds. Raises what the engine or the source raises.
        """
        to = self._receivers if receivers is None else receivers
        opened = self._thread.submit(self._open_version, version, deadline)
        sending: list[Future[None] | None] = [None] * IN_FLIGHT
        seals: list[str] = []
        total = 0
        for index in range(self._layout.bucket_count):
            slot = index % IN_FLIGHT
            if (earlier := sending[slot]) is not None:
                earlier.result()
            data = source.bucket(index)
            if self._layout.sealed:
                seals.append(seal(data))
                self._mail.put(version, index, seals[-1])
            opened.result()
            bucket = Bucket(version, index, data, self._layout.lasting)
            sending[slot] = self._thread.submit(self._send, bucket, to, deadline, stall_s)
            total += data.numel()
        for future in sending:
            if future is not None:
                future.result()
        opened.result()
        if self._layout.whole_tensors and self._layout.sealed:
            self._seals = {other: kept for other, kept in self._seals.items() if other > version - IN_FLIGHT}
            self._seals[version] = seals
        return total

    def _open_version(self, version: int, deadline: Deadline) -> None:
        if self._layout.whole_tensors:
            self._sender.open_version(version_files(replace(self._layout, version=version)), deadline)

    def _send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline, stall_s: float) -> None:
        started = time.perf_counter()
        self._sender.send(bucket, receivers, deadline.within(stall_s))
        if self._on_sent is not None:
            self._on_sent(bucket.version, bucket.index, bucket.nbytes, time.perf_counter() - started)

    def commit_version(self, version: int, deadline: Deadline) -> None:
        """`version` serves: readers of a store find it from now on. Raises what the engine raises."""
        seals = self._seals.get(version)
        documents = {} if seals is None else {SEALS_FILE: seals_document(seals)}
        self._wait_for(
            f"version {version} to be committed",
            lambda: self._sender.commit_version(version, documents, deadline),
            deadline,
        )

    def reclaim(self, version: int, deadline: Deadline) -> None:
        """Return once no receiver looks at lasting buckets of `version`. Raises what the engine raises."""
        self._wait_for(f"version {version} to be given back", lambda: self._sender.reclaim(version, deadline), deadline)

    def _wait_for(self, what: str, call: Callable[[], None], deadline: Deadline) -> None:
        closed = ClosedError(f"closed while waiting for {what}.", part=_PART)
        try:
            done = self._thread.submit(call)
        except RuntimeError as error:  # the executor takes nothing any more
            raise closed from error
        try:
            done.result(deadline.remaining_s)
        except CancelledError as error:
            raise closed from error
        except TimeoutError as error:
            if isinstance(error, WeightlaneError):
                raise
            raise deadline.error(what, part=_PART) from error

    def close(self) -> None:
        """Let the sending thread end; the sender itself is closed by its owner. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
