"""Decoding a delta on a thread of its own while the rest of it is still on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from weightlane.ckpt_engines import Deadline, WeightlaneError, as_weightlane_error

from .manifest import Manifest
from .progress import Progress
from .staged_delta import IncomingDelta


class DeltaDecoding:
    """Hands a delta to `prepare` as it arrives, on a thread of its own that ends with it.

    Args:
        manifest: What is to come.
        memory: Filled from the front: 1-D uint8, `manifest.wire_bytes` long.
        prepare: What is to be made of it.
        deadline: Nobody waits longer.
        part: Whose it is, for errors.
    """

    def __init__(
        self,
        manifest: Manifest,
        memory: torch.Tensor,
        prepare: Callable[[IncomingDelta], Any],
        deadline: Deadline,
        part: str,
    ) -> None:
        self._what = f"the delta of version {manifest.version}"
        self._part = part
        self._deadline = deadline
        self._progress = Progress(self._what, part)
        self._made: Future[Any] = Future()
        progress, made = self._progress, self._made
        incoming = IncomingDelta(manifest, memory, lambda until_bytes: progress.wait(until_bytes, deadline))

        def run() -> None:
            try:
                prepared = prepare(incoming)
                for _ in incoming.patches:  # whatever was left out must be valid, too
                    pass
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for it
                made.set_exception(error)
            else:
                made.set_result(prepared)

        threading.Thread(target=run, name=f"weightlane-decode-{part}", daemon=True).start()

    def arrived(self, until_bytes: int) -> None:
        """The first so many bytes are there and verified. Raises what decoding the ones before has failed with."""
        self._progress.advance(until_bytes)
        if self._made.done():
            self._made.result()

    def give_up(self, error: Exception) -> None:
        """Nothing more will come: the thread ends at the next segment."""
        self._progress.fail(as_weightlane_error(error, self._part))

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
