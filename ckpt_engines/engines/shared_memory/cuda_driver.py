"""`CudaDriver`: the dozen functions of the CUDA driver that pass device memory to another process.

torch can share its own storages (``_share_cuda_``), but then it shares entire blocks of the caching allocator, with everything
else in them. It counts references in a named file in /dev/shm, which a killed process leaves behind, and keeps memory until a
peer, which may be dead, has decremented the count. With expandable segments it refuses or changes the handle. So the driver
allocates each segment separately. Its library has one name and a stable interface wherever CUDA runs, so `ctypes` can call it
without another dependency.

Source: CUDA driver API reference, sections "Memory Management" and "Primary Context Management".
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator

from ...errors import StorageError, TransportError

HANDLE_BYTES = 64
"""Size of a memory handle (``CU_IPC_HANDLE_SIZE``)."""
_PART = "CUDA driver"
_OUT_OF_MEMORY = 2
"""``CUDA_ERROR_OUT_OF_MEMORY``."""
_LAZY_ENABLE_PEER_ACCESS = 1
"""``CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS``."""
_GRANULE_BYTES = 2 << 20
"""Allocations are multiples of this: smaller ones share a block, and a handle opens the complete block to the other process."""


class _IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``, which the driver takes by value."""

    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class CudaDriver:
    """Calls the driver in the primary context of a device, the one that torch uses.

    Devices are torch's indices: both honour ``CUDA_VISIBLE_DEVICES``. Every method raises `TransportError` with the driver's
    own name of the error. Use `cuda_driver` instead of making one.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise TransportError(f"cannot be loaded: {error}.", part=_PART) from error
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._call("cuInit", ctypes.c_uint(0))

    def allocate(self, device: int, nbytes: int) -> int:
        """Return the address of new device memory in blocks of its own. Raises `StorageError` when there is too little."""
        granules = -(-max(1, nbytes) // _GRANULE_BYTES)
        pointer = ctypes.c_uint64()
        with self._context(device):
            status = self._status("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(granules * _GRANULE_BYTES))
        if status == _OUT_OF_MEMORY:
            raise StorageError(
                f"no device memory for {granules * _GRANULE_BYTES >> 20} MiB on cuda:{device}.",
                part=_PART,
                hint="Use smaller buckets, or leave more of the device's memory free.",
            )
        self._check("cuMemAlloc_v2", status)
        return pointer.value

    def free(self, device: int, pointer: int) -> None:
        """Free memory that `allocate` returned. Waits for the device to be done with it."""
        with self._context(device):
            self._call("cuMemFree_v2", ctypes.c_uint64(pointer))

    def export(self, device: int, pointer: int) -> bytes:
        """Return the handle with which another process opens memory that `allocate` returned."""
        handle = _IpcHandle()
        with self._context(device):
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
        return bytes(handle)

    def open(self, device: int, handle: bytes) -> int:
        """Map another process's memory into `device`'s address space, over NVLink or PCIe if it is another device's."""
        pointer = ctypes.c_uint64()
        with self._context(device):
            self._call(
                "cuIpcOpenMemHandle_v2",
                ctypes.byref(pointer),
                _IpcHandle.from_buffer_copy(handle),
                ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
            )
        return pointer.value

    def close(self, device: int, pointer: int) -> None:
        """Unmap memory that `open` returned."""
        with self._context(device):
            self._call("cuIpcCloseMemHandle", ctypes.c_uint64(pointer))

    def copy(self, device: int, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Start to copy between device addresses on `stream` (a ``cudaStream_t`` of `device`)."""
        with self._context(device):
            self._call(
                "cuMemcpyDtoDAsync_v2",
                ctypes.c_uint64(destination),
                ctypes.c_uint64(source),
                ctypes.c_size_t(nbytes),
                ctypes.c_void_p(stream),
            )

    @contextlib.contextmanager
    def _context(self, device: int) -> Iterator[None]:
        if device not in self._contexts:
            handle, context = ctypes.c_int(), ctypes.c_void_p()
            self._call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
            self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
            self._contexts[device] = context  # never released: torch keeps it to the end of the process anyway
        self._call("cuCtxPushCurrent_v2", self._contexts[device])
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, function: str, *arguments: object) -> None:
        self._check(function, self._status(function, *arguments))

    def _status(self, function: str, *arguments: object) -> int:
        return int(getattr(self._library, function)(*arguments))

    def _check(self, function: str, status: int) -> None:
        if status:
            name = ctypes.c_char_p()
            self._library.cuGetErrorName(ctypes.c_int(status), ctypes.byref(name))
            raise TransportError(f"{function}: {(name.value or b'error').decode()} ({status}).", part=_PART)


@functools.cache
def cuda_driver() -> CudaDriver:
    """Return the driver of this process, loaded on first use. Raises `TransportError` when there is none."""
    return CudaDriver()
