"""The CUDA IPC engine: buckets stay in the sender's device memory, and receivers on the same host copy them out of it.

It is for trainer and rollout on one GPU, which NCCL refuses, and for GPUs that reach each other over NVLink or PCIe. A segment is
device memory that another process maps through CUDA's interprocess handles.

The sender records an interprocess event after the work that wrote the bucket, and announces the bucket. The receiver polls the
event until it has passed, copies on a stream of its own, polls an event after the copy, and acknowledges. No stream ever waits
for another process, so a peer that dies or stops midway blocks a host thread until the deadline and never a device.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import select
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ...channels.channel import Address, Channel
from ...contract.capabilities import Capabilities, Delivery
from ...errors import ProtocolError, StorageError, TransportError
from ...runtime.devices import CudaRuntime, is_available, runtime_of
from .cuda_driver import HANDLE_BYTES, CudaDriver, cuda_driver
from .segment_engine import SegmentEngine
from .segments import Segment, SegmentArena, SegmentMapping, close_descriptors, duplicate_sockets

_PART = "CUDA memory"
_OTHER_ENGINES = "Set checkpoint_engine.backend to nccl, or gloo."


class _DeviceMemory:
    """Memory allocated by the driver, freed when nothing refers to this object any more.

    torch makes a tensor over the memory through ``__cuda_array_interface__`` (version 3), which then keeps this object alive.
    """

    def __init__(self, driver: CudaDriver, device: int, nbytes: int) -> None:
        self.pointer = driver.allocate(device, nbytes)
        self.__cuda_array_interface__ = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (self.pointer, False),
            "version": 3,
        }
        weakref.finalize(self, _quietly_free, driver, device, self.pointer).atexit = False


def _quietly_free(driver: CudaDriver, device: int, pointer: int) -> None:
    with contextlib.suppress(TransportError):  # after a fault the context is lost, and its memory with it
        driver.free(device, pointer)


class CudaSegment(Segment):
    """A segment in the memory of one device."""

    def __init__(self, runtime: CudaRuntime, nbytes: int) -> None:
        driver, index = cuda_driver(), runtime.device.index
        try:
            memory = _DeviceMemory(driver, index, nbytes)
        except StorageError:
            runtime.empty_cache()  # torch's cache may keep unused memory
            memory = _DeviceMemory(driver, index, nbytes)
        self.nbytes = nbytes
        self.data = runtime.tensor_over(memory)
        self._runtime = runtime
        self._stream = runtime.stream_for(self)
        self._written, handle = runtime.interprocess_event()
        self._description = {"memory": _encode(driver.export(index, memory.pointer)), "event": _encode(handle)}

    def describe(self) -> tuple[Mapping[str, Any], Sequence[int]]:
        """See `Segment.describe`."""
        return self._description, ()

    def copy_in(self, data: torch.Tensor, after: Any) -> Any:
        """See `Segment.copy_in`."""
        with self._runtime.on(self._stream):
            self._runtime.wait_for(self._stream, after)
            self.data[: data.numel()].copy_(data, non_blocking=True)
        if data.device == self._runtime.device:
            self._runtime.record_stream(data, self._stream)
        return self._runtime.record_event(self._stream)

    def publish(self, after: Any) -> None:
        """See `Segment.publish`. Makes the event that receivers poll pass once `after` has passed."""
        with self._runtime.on(self._stream):
            self._runtime.wait_for(self._stream, after)
            self._written.record(self._stream)

    def retire(self) -> None:
        """See `Segment.retire`. The memory is freed with the last reference: CUDA forbids it while another process maps it."""


class CudaMapping(SegmentMapping):
    """A segment of another process, mapped for copies to a device."""

    def __init__(self, runtime: CudaRuntime, nbytes: int, description: Mapping[str, Any]) -> None:
        self._driver = cuda_driver()
        self._runtime = runtime
        self._index = runtime.device.index
        self.nbytes = nbytes
        memory, event = (_decode(description.get(key)) for key in ("memory", "event"))
        try:
            self._pointer = self._driver.open(self._index, memory)
        except TransportError as error:
            raise _cannot_map(runtime.device, error) from error
        try:
            self._written = runtime.event_of(event)
            self._stream = runtime.stream_for(self)
            self._copied = runtime.record_event(self._stream)
        except RuntimeError as error:
            self._driver.close(self._index, self._pointer)
            raise _cannot_map(runtime.device, error) from error

    def written(self) -> bool:
        """See `SegmentMapping.written`. The thread polls and no stream waits, so a sender that is gone blocks no device."""
        return bool(self._written.query())

    def start_copy(self, offset: int, into: torch.Tensor, after: Any) -> Callable[[], bool]:
        """See `SegmentMapping.start_copy`."""
        self._runtime.wait_for(self._stream, after)
        source, stream = self._pointer + offset, self._stream.cuda_stream
        self._driver.copy(self._index, into.data_ptr(), source, into.numel(), stream)
        self._runtime.record_stream(into, self._stream)  # the caller may drop the bucket after an error
        copied = self._copied = self._runtime.record_event(self._stream)
        return lambda: bool(copied.query())

    def copied(self) -> bool:
        """See `SegmentMapping.copied`. A copy whose deadline has passed may still run."""
        try:
            return bool(self._copied.query())
        except RuntimeError:  # after a fault nothing runs any more
            return True

    def close(self) -> None:
        """See `SegmentMapping.close`."""
        with contextlib.suppress(TransportError):  # after a fault nothing is mapped any more
            self._driver.close(self._index, self._pointer)


class CudaArena(SegmentArena):
    """Makes and maps segments on CUDA devices."""

    copies_in_background = True

    def facts(self, device: torch.device) -> Mapping[str, Any]:
        """Return the UUID of the segments' physical device, which is the same in every process."""
        return {"device": _runtime(device).uuid()}

    def check(self, facts: Address, device: torch.device, part: str, peer: str) -> None:
        """See `SegmentArena.check`. A device that is not visible in this process passes; mapping its segments may fail later."""
        theirs = facts.get("device")
        if isinstance(theirs, str) and not _runtime(device).can_reach(theirs):
            raise TransportError(
                f"{device} cannot access the memory of the sender's device {theirs}.",
                part=part,
                peer=peer,
                hint=_OTHER_ENGINES,
            )

    def create(self, nbytes: int, device: torch.device) -> CudaSegment:
        """See `SegmentArena.create`."""
        return CudaSegment(_runtime(device), max(1, nbytes))

    def map_segment(
        self, nbytes: int, description: Mapping[str, Any], descriptors: Sequence[int], device: torch.device
    ) -> CudaMapping:
        """See `SegmentArena.map_segment`."""
        close_descriptors(descriptors)  # a sender that keeps the protocol passes none
        return CudaMapping(_runtime(device), nbytes, description)

    def before_close(self, channels: Iterable[Channel], segments: Iterable[Segment]) -> None:
        """Keep memory that a receiver may still map until that receiver has closed its end.

        CUDA forbids freeing exported memory before it is unmapped elsewhere, and `close` may not wait for that.
        """
        kept = list(segments)
        sockets = duplicate_sockets(channels) if kept else []
        if not sockets:
            return
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        threading.Thread(
            target=_keep_until_closed, args=(sockets, kept), name="weightlane-keep-mapped", daemon=True
        ).start()


def _keep_until_closed(sockets: Iterable[socket.socket], segments: list[Segment]) -> None:
    """Keep `segments` until the other end of each of `sockets` is closed, or its process has died."""
    for sock in sockets:
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        closed = False
        while not closed:
            poller.poll()
            try:
                closed = not sock.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                closed = True
        sock.close()
    segments.clear()


def _runtime(device: torch.device) -> CudaRuntime:
    runtime = runtime_of(device)
    if not isinstance(runtime, CudaRuntime):
        raise TransportError(f"a bucket is on {device}, the engine works on CUDA devices.", part=_PART)
    return runtime


def _encode(handle: bytes) -> str:
    return base64.b64encode(handle).decode("ascii")


def _decode(text: object) -> bytes:
    try:
        handle = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        handle = b""
    if len(handle) != HANDLE_BYTES:
        raise ProtocolError("a segment has no valid CUDA handle.", part=_PART)
    return handle


def _cannot_map(device: torch.device, error: Exception) -> TransportError:
    reason = error.message if isinstance(error, TransportError) else f"{error}."
    return TransportError(
        f"{device} cannot map the sender's memory: {reason}",
        part=_PART,
        hint=(
            "The two processes must be on one host and in one IPC namespace (containers: share it, as with --ipc=host), and"
            f" their devices must reach each other over NVLink or PCIe. {_OTHER_ENGINES}"
        ),
    )


class CudaIpcEngine(SegmentEngine):
    """CUDA memory shared between processes of one host. For processes that share a GPU, or whose GPUs reach each other."""

    capabilities = Capabilities(
        devices=frozenset({"cuda"}),
        delivery=frozenset({Delivery.BROADCAST, Delivery.POINT_TO_POINT}),
        same_host_only=True,
    )
    label = "cuda_ipc"
    arena_type = CudaArena

    @classmethod
    def unavailable_reason(cls) -> str | None:
        """See `CheckpointEngine.unavailable_reason`."""
        if not sys.platform.startswith("linux"):
            return "CUDA passes memory between processes on Linux only"
        if torch.version.hip:
            return "ROCm is not supported"
        return None if is_available("cuda") else "no CUDA device"
