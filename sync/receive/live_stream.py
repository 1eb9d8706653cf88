"""`LiveStream`: passes a version to the writer of the live weights, one bucket after another, without staging it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import ClosedError, CommitError, Deadline, WeightlaneError, as_weightlane_error
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime

from ..version.manifest import Manifest
from ..version.tensor_spec import TensorSpec

_GRACE_S = 2.0
"""Extra seconds that the writer waits after the deadline, so that the receiving thread, which knows the cause, fails first."""


@dataclass(frozen=True, slots=True)
class LivePart:
    """A run of one tensor's elements.

    Attributes:
        name: The checkpoint tensor.
        start: First element in the row-major flattened tensor.
        values: The elements, 1-D, contiguous, in the tensor's wire dtype; valid for work that is queued on the thread's
            current stream before the next part is requested.
    """

    name: str
    start: int
    values: torch.Tensor


class LiveStream:
    """Passes verified buckets from the receiving threads to the thread that writes them, one at a time.

    Receiving threads call `offer` with each bucket, then one calls `finish`. The writing thread calls `begin`, then iterates
    over `parts`. When one side fails, the other side's call raises the same error; `fail` from any thread ends both. No call
    outlives the deadline by more than `_GRACE_S`.

    Args:
        manifest: Manifest of a full version.
        part: Name of the receiving participant, for error messages.
        deadline: Limit for writing the full version.
        on_ready: Called once, before the first bucket is passed on.
        live: Runtime of the device of the live weights.
    """

    def __init__(
        self, manifest: Manifest, part: str, deadline: Deadline, on_ready: Callable[[], None], live: DeviceRuntime
    ) -> None:
        self.manifest = manifest
        self._live = live
        self._regions = {spec.name: region for spec, region in zip(manifest.specs, manifest.regions, strict=True)}
        self._part = part
        self._deadline = deadline
        self._on_ready = on_ready
        self._offering = threading.Lock()
        """Held by the thread of the link whose bucket is being written."""
        self._ready = False
        self._changed = threading.Condition()
        self._bucket: tuple[int, torch.Tensor] | None = None
        """First byte in the stream and the bytes of the bucket to write."""
        self._begun = False
        self._complete = False
        self._error: WeightlaneError | None = None

    @property
    def version(self) -> int:
        """The version in the stream."""
        return self.manifest.version

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Every tensor of the version by name."""
        return {spec.name: spec for spec in self.manifest.tensors}

    # -- receiving threads, and the thread that aborts ---------------------------------------------------------------------

    def announce(self) -> None:
        """[receiver] Call `on_ready` unless it was called before."""
        with self._offering:
            if not self._ready:
                self._ready = True
                self._on_ready()

    def offer(self, index: int, data: torch.Tensor) -> None:
        """[receiver] Pass on the verified bucket `index`; returns once it has been written.

        Raises the error the stream failed with, or `DeadlineExceededError` when the bucket is not written in time.
        """
        self.announce()
        with self._offering, self._changed:
            self._bucket = self.manifest.window(index)[0], data
            self._changed.notify_all()
            written = self._changed.wait_for(
                lambda: self._bucket is None or self._error is not None, self._deadline.remaining_s
            )
            if self._error is None and not written:
                what = f"bucket {index} of version {self.version} to be written into the weights"
                hint = "The replica has not paused, or has not begun its commit, in time: its log may say why."
                self._fail(self._deadline.error(what, part=self._part, hint=hint))
            if self._error is not None:
                raise self._error

    def finish(self) -> None:
        """[receiver] Tell the writer that every bucket was written. Raises the error the stream failed with."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self._complete = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Fail the version with `error`. Does nothing once the stream is complete or has failed."""
        with self._changed:
            self._fail(as_weightlane_error(error, self._part))

    def _fail(self, error: WeightlaneError) -> None:
        if not self._complete and self._error is None:
            self._error = error
            self._changed.notify_all()

    # -- writing thread ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """[writer] Wait until there is a bucket to write. Nothing has been written when this raises.

        Raises the error the stream failed with, `DeadlineExceededError`, or `CommitError` if writing has begun before.
        """
        with self._changed:
            if self._begun:
                raise CommitError(
                    f"version {self.version} is being written already, or was.",
                    part=self._part,
                    hint="It has to be sent once more.",
                )
            self._begun = True
            self._wait()

    def parts(self) -> Iterator[LivePart]:
        """[writer] Yield every element of the version, in the order of the stream. Any step may raise as `begin` does.

        A bucket is given back once all work on the thread's current stream is done. If the writer stops before the end, the
        stream fails.
        """
        finished = False
        try:
            while (bucket := self._next()) is not None:
                yield from self._parts_of(*bucket)
                self._live.synchronize()  # the next bucket overwrites this one, whose reads may only be queued
                del bucket
                self._written()
            finished = True
        finally:
            if not finished:
                self.fail(ClosedError(f"version {self.version} was not written to its end.", part=self._part))

    def _next(self) -> tuple[int, torch.Tensor] | None:
        with self._changed:
            self._wait()
            return self._bucket

    def _wait(self) -> None:
        """Wait until there is a bucket or the stream has ended."""
        ready = self._changed.wait_for(
            lambda: self._bucket is not None or self._complete or self._error is not None,
            self._deadline.remaining_s + _GRACE_S,
        )
        if not ready:
            self._fail(self._deadline.error(f"the buckets of version {self.version}", part=self._part))
        if self._error is not None:
            raise self._error

    def _written(self) -> None:
        with self._changed:
            if self._error is not None:  # the receiver may have reused the bucket's memory while it was written
                raise self._error
            self._bucket = None
            self._changed.notify_all()

    def _parts_of(self, start: int, data: torch.Tensor) -> Iterator[LivePart]:
        for entry, low, high in self.manifest.tensors_within(start, start + data.numel()):
            size = entry.spec.dtype.itemsize
            values = data[low - start : high - start].view(entry.spec.dtype)
            region = self._regions[entry.spec.name]
            first, last = (low - entry.offset) // size, (high - entry.offset) // size
            at = 0
            for position, numel in region.box.runs(region.spec.shape, first, last):
                yield LivePart(region.spec.name, position, values[at : at + numel])
                at += numel
