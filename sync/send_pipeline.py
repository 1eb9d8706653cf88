"""Double buffering on the sending rank: while the engine sends one bucket, the next one is packed and sealed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from weightlane.ckpt_engines import Bucket, Deadline, Mailbox, Topology, WeightSender

from .manifest import Manifest
from .trailer import TRAILER_BYTES, seal

_BUFFERS = 2

FillBucket = Callable[[int, torch.Tensor], None]
"""Fills the payload (uint8, window-sized) of the bucket with the given index."""


OnSent = Callable[[int, int, int, float], None]
"""Told of every sent bucket: version, index, bytes, seconds."""


class SendPipeline:
    """Sends versions through one engine sender, which is called from one thread of this pipeline only.

    Args:
        sender: The engine's half; closed by its owner.
        layout: The stream.
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
            largest = min(self._layout.bucket_bytes, self._layout.total_bytes) + TRAILER_BYTES
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
            bucket = Bucket(version, index, framed, TRAILER_BYTES)
            sending[slot] = self._thread.submit(self._send, bucket, to, deadline, stall_s)
            total += framed.numel()
        for future in sending:
            if future is not None:
                future.result()
        return total

    def _send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline, stall_s: float) -> None:
        started = time.perf_counter()
        self._sender.send(bucket, receivers, deadline.within(stall_s))
        if self._on_sent is not None:
            self._on_sent(bucket.version, bucket.index, bucket.nbytes, time.perf_counter() - started)

    def commit_version(self, version: int, deadline: Deadline) -> None:
        """`version` serves: readers of a store find it from now on."""
        self._thread.submit(self._sender.commit_version, version, deadline).result(deadline.remaining_s)

    def close(self) -> None:
        """Let the sending thread end; the sender itself is closed by its owner. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._buffers = []
