"""Double buffering on the sending rank: while the engine sends one bucket, the next one is packed and sealed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import replace

import torch

from weightlane.ckpt_engines import Bucket, ClosedError, Deadline, Mailbox, Topology, WeightlaneError, WeightSender

from .manifest import Manifest
from .trailer import TRAILER_BYTES, seal
from .version_files import version_files

_BUFFERS = 2
_PART = "send pipeline"

FillBucket = Callable[[int, torch.Tensor], None]
"""Fills the payload (uint8, window-sized) of the bucket with the given index."""


OnSent = Callable[[int, int, int, float], None]
"""Told of every sent bucket: version, index, bytes, seconds."""


class SendPipeline:
    """Sends versions through one engine sender, which is called from one thread of this pipeline only.

    Args:
        sender: The engine's half; closed by its owner.
        layout: The stream. If its buckets hold whole tensors, the engine is a persistent one, and told of every version.
        receivers: Everybody who is connected.
        on_sent: Called on the pipeline's thread.
    """

    def __init__(
        self, sender: WeightSender, layout: Manifest, receivers: Sequence[str], on_sent: OnSent | None = None
    ) -> None:
        self._sender = sender
        self._layout = layout
        self._receivers = receivers
        self._on_sent = on_sent
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="weightlane-send")
        self._buffers: list[torch.Tensor] = []

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:
        """Connect the sender and allocate (and touch) the buffers it sends from."""

        def run() -> None:
            self._sender.connect(topology, mailbox, deadline)
            largest = self._layout.largest_bucket_bytes + TRAILER_BYTES
            self._buffers = [
                self._sender.allocate(largest).zero_() for _ in range(min(_BUFFERS, self._layout.bucket_count))
            ]

        self._thread.submit(run).result()

    def send_version(
        self,
        version: int,
        fill: FillBucket,
        deadline: Deadline,
        *,
        receivers: Sequence[str] | None = None,
        stall_s: float = float("inf"),
    ) -> int:
        """Fill, seal and send every bucket of `version` to `receivers`, everybody by default; returns the bytes sent.

        No bucket may take longer than `stall_s` seconds. Raises what the engine raises.
        """
        to = self._receivers if receivers is None else receivers
        opened = self._thread.submit(self._open_version, version, deadline)
        sending: list[Future[None] | None] = [None] * _BUFFERS
        total = 0
        for index in range(self._layout.bucket_count):
            slot = index % _BUFFERS
            if (earlier := sending[slot]) is not None:
                earlier.result()
            start, stop = self._layout.window(index)
            framed = self._buffers[slot][: stop - start + TRAILER_BYTES]
            fill(index, framed[:-TRAILER_BYTES])
            seal(framed, version, index)
            opened.result()
            bucket = Bucket(version, index, framed, TRAILER_BYTES)
            sending[slot] = self._thread.submit(self._send, bucket, to, deadline, stall_s)
            total += framed.numel()
        for future in sending:
            if future is not None:
                future.result()
        opened.result()
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
        closed = ClosedError(f"closed before version {version} was committed.", part=_PART)
        try:
            done = self._thread.submit(self._sender.commit_version, version, deadline)
        except RuntimeError as error:  # the executor takes nothing any more
            raise closed from error
        try:
            done.result(deadline.remaining_s)
        except CancelledError as error:
            raise closed from error
        except TimeoutError as error:
            if isinstance(error, WeightlaneError):
                raise
            raise deadline.error(f"version {version} to be committed", part=_PART) from error

    def close(self) -> None:
        """Let the sending thread end; the sender itself is closed by its owner. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._buffers = []
