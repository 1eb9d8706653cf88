"""`LiveStream`: a version on its way into live weights, bucket after bucket, without being staged first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import ClosedError, CommitError, Deadline, WeightlaneError, as_weightlane_error

from ..version.manifest import Manifest
from ..version.tensor_spec import TensorSpec

_GRACE_S = 2.0
"""How much longer the writer waits than whoever receives, who knows better what has happened."""


@dataclass(frozen=True, slots=True)
class LivePart:
    """A run of one tensor's elements.

    Attributes:
        name: The checkpoint tensor.
        start: Its first element in the row-major flattened tensor.
        values: The elements, 1-D, contiguous, in the tensor's wire dtype; valid until the next piece is asked for.
    """

    name: str
    start: int
    values: torch.Tensor


class LiveStream:
    """Hands verified buckets from the thread that receives them to the one that writes them, one at a time.

    The receiving thread calls `offer` with each bucket, which returns when it has been written, then `finish`, or `fail`.
    The writing thread calls `begin`, then goes through `pieces`. Whichever of the two fails, the other one's call raises the
    same error; `fail` from any third thread ends both. No call outlives the deadline by more than a moment.

    Args:
        manifest: Of a version in full.
        part: Name of the receiving participant, for error messages.
        deadline: When everything has to be written.
    """

    def __init__(self, manifest: Manifest, part: str, deadline: Deadline) -> None:
        self.manifest = manifest
        self._regions = {spec.name: region for spec, region in zip(manifest.specs, manifest.regions, strict=True)}
        self._part = part
        self._deadline = deadline
        self._changed = threading.Condition()
        self._bucket: tuple[int, torch.Tensor] | None = None
        self._begun = False
        self._complete = False
        self._error: WeightlaneError | None = None

    @property
    def version(self) -> int:
        """The version it carries."""
        return self.manifest.version

    @property
    def specs(self) -> dict[str, TensorSpec]:
        """Every tensor of the version by name."""
        return {spec.name: spec for spec in self.manifest.tensors}

    # -- receiving thread, and whoever gives the version up ----------------------------------------------------------------

    def offer(self, index: int, data: torch.Tensor) -> None:
        """[receiver] Bucket `index`, verified, is there: return once it has been written.

        Raises what the stream was failed with, or `DeadlineExceededError` when nobody writes it in time.
        """
        with self._changed:
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
        """[receiver] Every bucket was written."""
        with self._changed:
            if self._error is not None:
                raise self._error
            self._complete = True
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """The version is given up. Of no effect once it is complete, or has failed already."""
        with self._changed:
            self._fail(as_weightlane_error(error, self._part))

    def _fail(self, error: WeightlaneError) -> None:
        if not self._complete and self._error is None:
            self._error = error
            self._changed.notify_all()

    # -- writing thread ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """[writer] Wait until there is something to write. Nothing has been written when this raises.

        Raises what the stream was failed with, `DeadlineExceededError`, or `CommitError` if somebody writes it already.
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

    def pieces(self) -> Iterator[LivePart]:
        """[writer] Every element of the version, in the order of the stream. Raises as `begin`, half-way.

        To stop before the end is to give the version up.
        """
        finished = False
        try:
            while (bucket := self._next()) is not None:
                yield from self._cut(*bucket)
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
        """Until there is a bucket, or there will be none."""
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
            if self._error is not None:  # what was written may have been received over meanwhile
                raise self._error
            self._bucket = None
            self._changed.notify_all()

    def _cut(self, start: int, data: torch.Tensor) -> Iterator[LivePart]:
        for entry, low, high in self.manifest.pieces(start, start + data.numel()):
            size = entry.spec.dtype.itemsize
            values = data[low - start : high - start].view(entry.spec.dtype)
            region = self._regions[entry.spec.name]
            first, last = (low - entry.offset) // size, (high - entry.offset) // size
            at = 0
            for position, numel in region.box.runs(region.spec.shape, first, last):
                yield LivePart(region.spec.name, position, values[at : at + numel])
                at += numel
