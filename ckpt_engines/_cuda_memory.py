"""Segments in CUDA memory: the sender's memory is mapped by another process, through CUDA's interprocess handles.

Who waits for whom: the sender records an interprocess event behind whatever wrote the bucket, and announces the bucket. The
receiver asks the event until it has passed, copies on a stream of its own, asks an event behind the copy, and acknowledges.
No stream ever waits for another process, so a peer that dies or stops in the middle blocks a host thread until the deadline
and never a device.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import select
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ._channel import Channel
from ._cuda_driver import HANDLE_BYTES, CudaDriver, cuda_driver
from ._segments import MappedSegment, OwnedSegment, SegmentKind
from .contract import Address
from .errors import ProtocolError, StorageError, TransportError

_PART = "CUDA memory"
_OTHER_ENGINES = "Set checkpoint_engine.backend to nccl, or gloo."
_EAGER_S = 0.002
_EAGER_PAUSE_S = 0.00002
_LAST_COPY_WAIT_S = 1.0


class _Block:
    """Device memory of its own, given back when nothing refers to it any more.

    torch looks at it through ``__cuda_array_interface__`` (version 3) and then keeps it alive.
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


class CudaSegment(OwnedSegment):
    """Memory on one device of the process that made it."""

    def __init__(self, device: torch.device, nbytes: int) -> None:
        driver = cuda_driver()
        try:
            block = _Block(driver, device.index, nbytes)
        except StorageError:
            torch.cuda.empty_cache()  # torch may hold what others gave back
            block = _Block(driver, device.index, nbytes)
        self.nbytes = nbytes
        self.data = torch.as_tensor(block, device=device)
        self._device = device
        with torch.cuda.device(device):
            self._written = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
            self._description = {
                "memory": _encode(driver.export(device.index, block.pointer)),
                "event": _encode(self._written.ipc_handle()),  # type: ignore[no-untyped-call]
            }

    def describe(self) -> tuple[Mapping[str, Any], Sequence[int]]:
        """See `OwnedSegment.describe`."""
        return self._description, ()

    def publish(self) -> None:
        """See `OwnedSegment.publish`: record the event that the receivers ask."""
        self._written.record(torch.cuda.current_stream(self._device))

    def retire(self) -> None:
        """See `OwnedSegment.retire`. CUDA forbids to free what another process maps, so whoever knows of one holds this."""


class CudaMapping(MappedSegment):
    """Another process's segment, mapped for copies to `device`."""

    def __init__(self, device: torch.device, nbytes: int, description: Mapping[str, Any]) -> None:
        self._driver = cuda_driver()
        self._device = device
        self.nbytes = nbytes
        memory, event = (_decode(description.get(key)) for key in ("memory", "event"))
        try:
            self._pointer = self._driver.open(device.index, memory)
        except TransportError as error:
            raise _cannot_map(device, error) from error
        try:
            self._written = torch.cuda.Event.from_ipc_handle(device, event)  # type: ignore[no-untyped-call]
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self._driver.close(device.index, self._pointer)
            raise _cannot_map(device, error) from error

    def copy_out(self, offset: int, into: torch.Tensor, wait: Callable[[Callable[[], bool]], None]) -> None:
        """See `MappedSegment.copy_out`."""
        if into.device != self._device:
            raise TransportError(f"a bucket is on {into.device}, the ones before on {self._device}.", part=_PART)
        _wait_eagerly(self._written.query, wait)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))  # whatever used the bucket's memory before
        into.record_stream(self._stream)  # the caller may drop the bucket after an error
        source, stream = self._pointer + offset, self._stream.cuda_stream
        self._driver.copy(self._device.index, into.data_ptr(), source, into.numel(), stream)
        self._copied.record(self._stream)
        _wait_eagerly(self._copied.query, wait)

    def close(self) -> None:
        """Unmap it, once the last copy is over: one may still run if its deadline passed."""
        give_up_at = time.monotonic() + _LAST_COPY_WAIT_S
        with contextlib.suppress(RuntimeError, TransportError):  # after a fault nothing is mapped any more
            while not self._copied.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > give_up_at:
                    return  # a mapping too many is harmless, one too few kills the copy's process
                time.sleep(_EAGER_PAUSE_S)
            self._driver.close(self._device.index, self._pointer)


class CudaSegments(SegmentKind):
    """Segments on the device that is current where the sender first says its address."""

    def __init__(self) -> None:
        self._device: torch.device | None = None

    def facts(self) -> Mapping[str, Any]:
        """Which physical device the segments are on, in words that mean the same in every process."""
        return {"device": _uuid(self._own_device().index)}

    def _own_device(self) -> torch.device:
        if self._device is None:
            self._device = torch.device("cuda", torch.cuda.current_device())
        return self._device

    def check(self, facts: Address, part: str, peer: str) -> None:
        """Two devices must reach each other's memory. A device that is not visible here is found out by mapping."""
        mine = torch.cuda.current_device()
        theirs = next(
            (index for index in range(torch.cuda.device_count()) if _uuid(index) == facts.get("device")), mine
        )
        if theirs != mine and not torch.cuda.can_device_access_peer(mine, theirs):
            raise TransportError(
                f"cuda:{mine} cannot access the memory of the sender's cuda:{theirs}.",
                part=part,
                peer=peer,
                hint=_OTHER_ENGINES,
            )

    def create(self, nbytes: int, device: torch.device) -> CudaSegment:
        """See `SegmentKind.create`. For a bucket outside of CUDA memory, on the sender's own device."""
        if device.type != "cuda" or device.index is None:
            device = self._own_device()
        return CudaSegment(device, max(1, nbytes))

    def adopt(
        self,
        nbytes: int,
        description: Mapping[str, Any],
        descriptors: Sequence[int],  # noqa: ARG002 - there are none, and a kernel closes what nobody took
        device: torch.device,
    ) -> CudaMapping:
        """See `SegmentKind.adopt`."""
        if device.type != "cuda":
            raise TransportError(f"a bucket is on {device}, the engine works on CUDA devices.", part=_PART)
        return CudaMapping(device, nbytes, description)

    def hang_up(self, channels: Iterable[Channel], segments: Iterable[OwnedSegment]) -> None:
        """See `SegmentKind.hang_up`. Memory that a peer may still map is kept until that peer has hung up.

        CUDA forbids freeing exported memory before it is unmapped elsewhere, and `close` may not wait for that.
        """
        channels, kept = list(channels), list(segments)
        sockets = [socket.socket(fileno=socket.dup(channel.fileno())) for channel in channels] if kept else []
        super().hang_up(channels, ())
        if not sockets:
            return
        for sock in sockets:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        threading.Thread(
            target=_keep_until_hang_up, args=(sockets, kept), name="weightlane-cuda-ipc-free", daemon=True
        ).start()


def _keep_until_hang_up(sockets: Iterable[socket.socket], segments: list[OwnedSegment]) -> None:
    """Hold `segments` until the other end of every one of `sockets` is closed, or its process dead."""
    for sock in sockets:
        poller = select.poll()
        poller.register(sock, select.POLLIN)
        hung_up = False
        while not hung_up:
            poller.poll()
            try:
                hung_up = not sock.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                hung_up = True
        sock.close()
    segments.clear()


def _wait_eagerly(done: Callable[[], bool], wait: Callable[[Callable[[], bool]], None]) -> None:
    """Ask often for the time that a copy on one device takes, then at leisure."""
    until = time.monotonic() + _EAGER_S
    while not done():
        if time.monotonic() > until:
            wait(done)
            return
        time.sleep(_EAGER_PAUSE_S)


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _encode(handle: bytes) -> str:
    return base64.b64encode(handle).decode("ascii")


def _decode(text: object) -> bytes:
    try:
        handle = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except (binascii.Error, ValueError):
        handle = b""
    if len(handle) != HANDLE_BYTES:
        raise ProtocolError("a segment came without a valid CUDA handle.", part=_PART)
    return handle


def _cannot_map(device: torch.device, error: Exception) -> TransportError:
    reason = error.message if isinstance(error, TransportError) else f"{error}."
    return TransportError(
        f"{device} cannot map the sender's memory: {reason}",
        part=_PART,
        hint=(
            "Both processes must be two, on one host, in one IPC namespace (containers: share it, as with --ipc=host), and"
            f" their devices must reach each other over NVLink or PCIe. {_OTHER_ENGINES}"
        ),
    )
