"""Decoding a delta on a thread of its own while the rest of it is still on its way."""

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
"""Buckets that have arrived and that nobody has begun to decode, at most: so much memory do they take beside what was decoded."""


class _Arrived:
    """Buckets between whoever receives and whoever decodes, who wants them in the stream's order. Thread-safe."""

    def __init__(self, what: str, part: str, deadline: Deadline) -> None:
        self._what = what
        self._part = part
        self._deadline = deadline
        self._changed = threading.Condition()
        self._buckets: dict[int, torch.Tensor] = {}
        self._next = 0
        self._error: WeightlaneError | None = None

    def put(self, index: int, bucket: torch.Tensor) -> None:
        """Once the ones before were taken, unless another sender still owes one of them. Returns, too, if nobody will take it."""
        with self._changed:
            self._wait_for(lambda: len(self._buckets) < _WAITING or self._lacks_next(), f"{self._what} to be decoded")
            self._buckets[index] = bucket
            self._changed.notify_all()

    def _lacks_next(self) -> bool:
        return self._next not in self._buckets

    def take(self) -> torch.Tensor:
        """The next one. Raises why there will be none."""
        with self._changed:
            self._wait_for(lambda: not self._lacks_next(), self._what)
            if self._error is not None:
                raise self._error
            self._changed.notify_all()
            self._next += 1
            return self._buckets.pop(self._next - 1)

    def end(self, error: WeightlaneError) -> None:
        """Nobody puts, or takes, any more."""
        with self._changed:
            self._error = self._error or error
            self._buckets.clear()
            self._changed.notify_all()

    def _wait_for(self, there: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(lambda: self._error is not None or there(), self._deadline.remaining_s):
            raise self._deadline.error(what, part=self._part)


class DeltaDecoding:
    """Hands a delta to `prepare` as it arrives, on a thread of its own that ends with it.

    Args:
        manifest: What is to come.
        prepare: What is to be made of it.
        deadline: Nobody waits longer.
        part: Whose it is, for errors.
        runtime: Of the device on which it is prepared.
        stream: Of that device, on which whatever `prepare` starts is done when `result` returns; None on a CPU.
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
        self._arrived = _Arrived(self._what, part, deadline)
        self._made: Future[Any] = Future()
        arrived, made = self._arrived, self._made
        incoming = IncomingDelta(manifest, arrived.take)

        def run() -> None:
            try:
                with runtime.on(stream):
                    prepared = prepare(incoming)
                    for _ in incoming.patches:  # whatever was left out must be valid, too
                        pass
                runtime.finish(stream)  # others use it on theirs
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for it
                made.set_exception(error)
            else:
                made.set_result(prepared)
            arrived.end(ClosedError("it was decoded, or could not be.", part=part))

        threading.Thread(target=run, name=f"weightlane-decode-{part}", daemon=True).start()

    def arrived(self, index: int, bucket: torch.Tensor) -> None:
        """Bucket `index` is there and verified; it is not written to again. Raises what decoding has failed with."""
        self._arrived.put(index, bucket)
        if self._made.done():
            self._made.result()

    def give_up(self, error: Exception) -> None:
        """Nothing more will come: the thread ends."""
        self._arrived.end(as_weightlane_error(error, self._part))

    def result(self) -> Any:
        """What `prepare` has made of all of it. Raises what it raised, or `DeadlineExceededError`."""
        try:
            return self._made.result(self._deadline.remaining_s)
        except TimeoutError as error:
            if isinstance(error, WeightlaneError):
                raise
            late = self._deadline.error(f"{self._what} to be decoded", part=self._part)
            self.give_up(late)
            raise late from error
