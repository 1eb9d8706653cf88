"""What training and decoding do to a machine meanwhile: small products in a loop, counted."""

from __future__ import annotations

import threading
import time

import torch

_TRAINING_SIDE = 256
_DECODING_SIDE = 4096
"""64 MiB of float32, more than caches hold: as in decoding, every step reads the weights from memory. A GPU trains
with it, too."""


def finish(device: torch.device) -> None:
    """Return when everything that this thread has asked of a GPU is done."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


class Loop:
    """Multiplies on a thread of its own until stopped.

    Args:
        decoding: A matrix by a vector, which memory bandwidth limits, instead of by a matrix.
        turn: Held for each step: who holds it meanwhile stops the loop.
        device: On which it computes.
    """

    def __init__(self, turn: threading.Lock, *, decoding: bool, device: torch.device) -> None:
        side = _DECODING_SIDE if decoding or device.type != "cpu" else _TRAINING_SIDE
        self._left = torch.ones(side, side, device=device)
        self._right = torch.ones(side, 1 if decoding else side, device=device)
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
        into = torch.empty(self._left.shape[0], self._right.shape[1], device=self._left.device)
        while not self._stopped.is_set():
            with self._turn:
                torch.mm(self._left, self._right, out=into)
                finish(into.device)
            self._steps += 1
