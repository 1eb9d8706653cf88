"""A load like that of training or decoding: matrix products in a loop, counted."""

from __future__ import annotations

import threading
import time

import torch

from weightlane.ckpt_engines.runtime.devices import DeviceRuntime

_TRAINING_SIDE = 256
_DECODING_SIDE = 4096
"""64 MiB of float32, more than caches hold, so that every step reads the matrix from memory as decoding does. A GPU also trains
with it, because a smaller product would only measure launches."""


class Loop:
    """Multiplies matrices on a thread of its own until it is stopped.

    Holds `turn` during each step, so that another holder stops the loop. If `decoding`, it multiplies a matrix by a vector, which
    memory bandwidth limits, instead of by a matrix.
    """

    def __init__(self, turn: threading.Lock, *, decoding: bool, runtime: DeviceRuntime) -> None:
        side = _DECODING_SIDE if decoding or runtime.has_streams else _TRAINING_SIDE
        self._left = torch.ones(side, side, device=runtime.device)
        self._right = torch.ones(side, 1 if decoding else side, device=runtime.device)
        self._runtime = runtime
        runtime.synchronize()  # before the loop reads them on another stream
        self._turn = turn
        self._steps = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weightlane-bench-loop", daemon=True)
        self._thread.start()

    def steps(self) -> tuple[int, float]:
        """Return the number of steps so far and `time.monotonic`."""
        return self._steps, time.monotonic()

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        # On the stream of the worker's main thread, commits would wait for the loop's steps.
        with self._runtime.on(self._runtime.stream_for(self)):
            into = torch.empty(self._left.shape[0], self._right.shape[1], device=self._left.device)
            while not self._stopped.is_set():
                with self._turn:
                    torch.mm(self._left, self._right, out=into)
                    self._runtime.synchronize()
                self._steps += 1
