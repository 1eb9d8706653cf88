"""What training and decoding do to a machine meanwhile: small products in a loop, counted."""

from __future__ import annotations

import threading
import time

import torch

from weightlane.ckpt_engines.runtime.devices import DeviceRuntime

_TRAINING_SIDE = 256
_DECODING_SIDE = 4096
"""64 MiB of float32, more than caches hold: as in decoding, every step reads the weights from memory. A GPU trains
with it, too."""


class Loop:
    """Multiplies on a thread of its own until stopped.

    Args:
        decoding: A matrix by a vector, which memory bandwidth limits, instead of by a matrix.
        turn: Held for each step: who holds it meanwhile stops the loop.
        runtime: Of the device on which it computes.
    """

    def __init__(self, turn: threading.Lock, *, decoding: bool, runtime: DeviceRuntime) -> None:
        side = _DECODING_SIDE if decoding or runtime.has_streams else _TRAINING_SIDE
        self._left = torch.ones(side, side, device=runtime.device)
        self._right = torch.ones(side, 1 if decoding else side, device=runtime.device)
        self._runtime = runtime
        runtime.finish()  # the loop has a stream of its own
        self._turn = turn
        self._steps = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightlane-bench-loop", daemon=True)
        self._thread.start()

    def steps(self) -> tuple[int, float]:
        """Steps so far, and `time.monotonic` now."""
        return self._steps, time.monotonic()

    def stop(self) -> None:
        """End."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        # On the stream that the worker's other thread has, too, its commits would wait for the loop's steps.
        with self._runtime.on(self._runtime.new_stream()):
            into = torch.empty(self._left.shape[0], self._right.shape[1], device=self._left.device)
            while not self._stopped.is_set():
                with self._turn:
                    torch.mm(self._left, self._right, out=into)
                    self._runtime.finish()
                self._steps += 1
