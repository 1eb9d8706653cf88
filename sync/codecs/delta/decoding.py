"""A thread that decodes a delta while the rest of it is still arriving."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from weightlane.ckpt_engines import ClosedError, Deadline, WeightlaneError, as_weightlane_error
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime

from ...version.manifest import Manifest
from .staged_delta import IncomingDelta

_WAITING = 1
"""Limit for received buckets that are not decoded yet: their memory is needed in addition to the decoded delta's."""


class _BucketQueue:
    """A queue of buckets that arrive in any order and are taken in the stream's order. Thread-safe."""

    def __init__(self, what: str, part: str, deadline: Deadline) -> None:
        self._what = what
        self._part = part
        self._deadline = deadline
        self._changed = threading.Condition()
        self._buckets: dict[int, torch.Tensor] = {}
        self._next = 0
        self._error: WeightlaneError | None = None

    def put(self, index: int, bucket: torch.Tensor) -> None:
        """Add a bucket once there is room, or at once while the next bucket in the stream's order has not arrived.

        Returns after `end`, too.
        """
        with self._changed:
            self._wait_for(lambda: len(self._buckets) < _WAITING or self._lacks_next(), f"{self._what} to be decoded")
            self._buckets[index] = bucket
            self._changed.notify_all()

    def _lacks_next(self) -> bool:
        return self._next not in self._buckets

    def take(self) -> torch.Tensor:
        """Wait for the next bucket. Raises the error given to `end`."""
        with self._changed:
            self._wait_for(lambda: not self._lacks_next(), self._what)
            if self._error is not None:
                raise self._error
            self._changed.notify_all()
            self._next += 1
            return self._buckets.pop(self._next - 1)

    def end(self, error: WeightlaneError) -> None:
        """End all waits: `take` raises `error`, and `put` returns."""
        with self._changed:
            self._error = self._error or error
            self._buckets.clear()
            self._changed.notify_all()

    def _wait_for(self, there: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(lambda: self._error is not None or there(), self._deadline.remaining_s):
            raise self._deadline.error(what, part=self._part)


class DeltaDecoding:
    """Passes a delta to `prepare` as it arrives, on a thread that ends with the delta.

    Args:
        manifest: The manifest of the delta.
        prepare: Called with the delta; `result` returns its result.
        deadline: Limit for every wait.
        part: The receiver, for errors.
        runtime: The runtime of the device on which the delta is prepared.
        stream: The stream of that device that `prepare` works on; `result` waits for it. None on a CPU.
    """

    def __init__(
        self,
        manifest: Manifest,
        prepare: Callable[[IncomingDelta], Any],
        deadline: Deadline,
        part: str,
        runtime: DeviceRuntime,
        stream: Any = None,
    ) -> None:
        self._what = f"the delta of version {manifest.version}"
        self._part = part
        self._deadline = deadline
        self._queue = _BucketQueue(self._what, part, deadline)
        self._prepared: Future[Any] = Future()
        queue, future = self._queue, self._prepared
        incoming = IncomingDelta(manifest, queue.take)

        def run() -> None:
            try:
                with runtime.on(stream):
                    prepared = prepare(incoming)
                    for _ in incoming.patches:  # patches that `prepare` left out must be valid, too
                        pass
                runtime.synchronize(stream)  # others use the result on their own streams
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                future.set_exception(error)
            else:
                future.set_result(prepared)
            queue.end(ClosedError("it was decoded, or could not be.", part=part))

        threading.Thread(target=run, name=f"weightlane-decode-{part}", daemon=True).start()

    def arrived(self, index: int, bucket: torch.Tensor) -> None:
        """Pass on a verified bucket, whose memory must not be written to again. Raises the error with which decoding failed."""
        self._queue.put(index, bucket)
        if self._prepared.done():
            self._prepared.result()

    def give_up(self, error: Exception) -> None:
        """End the thread, because no bucket will arrive any more."""
        self._queue.end(as_weightlane_error(error, self._part))

    def result(self) -> Any:
        """Wait for the result of `prepare`. Raises its error, or `DeadlineExceededError`."""
        try:
            return self._prepared.result(self._deadline.remaining_s)
        except TimeoutError as error:
            if isinstance(error, WeightlaneError):
                raise
            late = self._deadline.error(f"{self._what} to be decoded", part=self._part)
            self.give_up(late)
            raise late from error
