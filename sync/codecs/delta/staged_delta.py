"""The receiver's side of a delta: a thread decodes it while it arrives, and it is checked before it changes a tensor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from weightlane.ckpt_engines import ClosedError, Deadline, ProtocolError, WeightlaneError, as_weightlane_error
from weightlane.ckpt_engines.runtime.devices import DeviceRuntime

from ...version.box import Box
from ...version.manifest import CODEC_DENSE, Manifest
from ...version.manifest_message import DeltaSegment
from ...version.tensor_spec import TensorSlice
from .format import Patch, decode


class IncomingDelta:
    """A delta that is still arriving. Each segment is decoded as soon as its bytes are there.

    Args:
        manifest: The manifest of the delta.
        next_bucket: Waits for the next bytes of the segments: verified, 1-D uint8 of any length.
    """

    def __init__(self, manifest: Manifest, next_bucket: Callable[[], torch.Tensor]) -> None:
        self.manifest = manifest
        self.patches = self._decoded(next_bucket)
        """Segments that changed, each with its patch, to be read once.

        Raises `ProtocolError` for bytes that are no delta of the segment, and the errors of `next_bucket`.
        """

    @property
    def version(self) -> int:
        """The version that the delta leads to."""
        return self.manifest.version

    def _decoded(self, next_bucket: Callable[[], torch.Tensor]) -> Iterator[tuple[DeltaSegment, Patch]]:
        left = torch.empty(0, dtype=torch.uint8)
        for segment in self.manifest.segments:
            spec = self.manifest.specs[segment.tensor]
            parts, missing = [left], segment.nbytes - left.numel()
            while missing > 0:
                parts.append(next_bucket().cpu())
                missing -= parts[-1].numel()
            data = torch.cat(parts) if len(parts) > 1 else left
            left, data = data[segment.nbytes :], data[: segment.nbytes]
            try:
                patch = decode(data, elements=segment.numel, itemsize=spec.dtype.itemsize)
            except ProtocolError as error:
                raise ProtocolError(f"the delta of {spec.name}: {error.message}", part=error.part) from error
            if patch.carried:
                yield segment, patch

    def where(self, segment: DeltaSegment) -> TensorSlice:
        """The slice of a checkpoint tensor that a segment changes."""
        return _changed_slice(self.manifest, segment)


@dataclass(frozen=True, slots=True)
class StagedDelta:
    """The patches that turn one version into another."""

    manifest: Manifest
    patches: tuple[tuple[DeltaSegment, Patch], ...]
    """Segments that changed, each with its patch."""

    @classmethod
    def of(cls, delta: IncomingDelta) -> StagedDelta:
        """Wait for all of `delta`. Raises the errors of `IncomingDelta.patches`."""
        return cls(delta.manifest, tuple(delta.patches))

    @property
    def version(self) -> int:
        """The version that the delta leads to."""
        return self.manifest.version

    @property
    def as_dense(self) -> Manifest:
        """The manifest that the same version would have in full."""
        return replace(self.manifest, codec=CODEC_DENSE, base_version=None, base_identity="", segments=())

    def to(self, device: torch.device) -> StagedDelta:
        """The delta on another device."""
        return replace(self, patches=tuple((segment, patch.to(device)) for segment, patch in self.patches))

    def swap(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Flip the bits of `tensors` in which the two versions differ.

        This turns the base into the version; the same again rolls back.

        Args:
            tensors: The tensors of the checkpoint by name, contiguous, on the device of the patches.
        """
        for segment, patch in self.patches:
            where = _changed_slice(self.manifest, segment)
            _swap(patch, tensors[where.spec.name], where.box)

    def swap_staged(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Flip as `swap` does, in the tensors of the stream."""
        for segment, patch in self.patches:
            _swap(patch, tensors[self.manifest.specs[segment.tensor].name], segment.box)


def _changed_slice(manifest: Manifest, segment: DeltaSegment) -> TensorSlice:
    """The slice of a checkpoint tensor that a segment changes."""
    region = manifest.regions[segment.tensor]
    return TensorSlice(region.spec, segment.box.moved_into(region.box))


def _swap(patch: Patch, tensor: torch.Tensor, box: Box) -> None:
    """Flip bits of the slice `box` of `tensor`."""
    run = box.run(tuple(tensor.shape))
    if run is not None:
        patch.flip_(tensor.view(-1)[run[0] : run[0] + run[1]])
        return
    part = tensor[box.index]
    packed = part.contiguous()
    patch.flip_(packed)
    part.copy_(packed)


_WAITING = 1
"""Limit for received buckets that are not decoded yet: their memory is needed in addition to the decoded delta's."""


class DeltaDecoding:
    """Passes a delta to `prepare` as it arrives, on a thread that ends with the delta.

    Buckets arrive in any order, and are decoded in the stream's order.

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
        self._changed = threading.Condition()
        self._buckets: dict[int, torch.Tensor] = {}
        """Buckets that arrived and are not decoded yet, by index."""
        self._next = 0
        """Index of the bucket that is decoded next."""
        self._error: WeightlaneError | None = None
        """Why no bucket is decoded any more."""
        self._prepared: Future[Any] = Future()
        incoming = IncomingDelta(manifest, self._take)

        def run() -> None:
            try:
                with runtime.on(stream):
                    prepared = prepare(incoming)
                    for _ in incoming.patches:  # patches that `prepare` left out must be valid, too
                        pass
                runtime.synchronize(stream)  # others use the result on their own streams
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                self._prepared.set_exception(error)
            else:
                self._prepared.set_result(prepared)
            self.give_up(ClosedError("it was decoded, or could not be.", part=part))

        threading.Thread(target=run, name=f"weightlane-decode-{part}", daemon=True).start()

    def arrived(self, index: int, bucket: torch.Tensor) -> None:
        """Pass on a verified bucket, whose memory must not be written to again. Raises the error with which decoding failed.

        Waits until there is room, unless the bucket that is decoded next has not arrived.
        """
        with self._changed:
            self._wait_for(
                lambda: len(self._buckets) < _WAITING or self._next not in self._buckets, f"{self._what} to be decoded"
            )
            self._buckets[index] = bucket
            self._changed.notify_all()
        if self._prepared.done():
            self._prepared.result()

    def _take(self) -> torch.Tensor:
        """Wait for the bucket that is decoded next. Raises the error given to `give_up`."""
        with self._changed:
            self._wait_for(lambda: self._next in self._buckets, self._what)
            if self._error is not None:
                raise self._error
            self._next += 1
            self._changed.notify_all()
            return self._buckets.pop(self._next - 1)

    def _wait_for(self, there: Callable[[], bool], what: str) -> None:
        if not self._changed.wait_for(lambda: self._error is not None or there(), self._deadline.remaining_s):
            raise self._deadline.error(what, part=self._part)

    def give_up(self, error: Exception) -> None:
        """End the thread, because no bucket will arrive any more."""
        with self._changed:
            self._error = self._error or as_weightlane_error(error, self._part)
            self._buckets.clear()
            self._changed.notify_all()

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
