"""Double buffering on the sending rank: while the engine sends one bucket, the next one is packed and sealed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from weightlane.ckpt_engines import Bucket, Deadline, Mailbox, Topology, WeightSender

from .manifest import Manifest
from .trailer import TRAILER_BYTES, seal

_BUFFERS = 2

FillBucket = Callable[[int, torch.Tensor], None]
"""Fills the payload (uint8, window-sized) of the bucket with the given index."""


class SendPipeline:
    """Sends versions through one engine sender, which is called from one thread of this pipeline only."""

    def __init__(self, sender: WeightSender, layout: Manifest, receivers: Sequence[str]) -> None:
        self._sender = sender
        self._layout = layout
        self._receivers = receivers
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

    def send_version(self, version: int, fill: FillBucket, deadline: Deadline) -> int:
        """Fill, seal and send every bucket of `version`; returns the bytes sent. Raises what the engine raises."""
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
            bucket = Bucket(version, index, framed)
            sending[slot] = self._thread.submit(self._sender.send, bucket, self._receivers, deadline)
            total += framed.numel()
        for future in sending:
            if future is not None:
                future.result()
        return total

    def close(self) -> None:
        """Let the sending thread end; the sender itself is closed by its owner. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        self._buffers = []
