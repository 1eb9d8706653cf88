"""Reading a bucket's bytes out of a file: the payload is the end of the file, after a safetensors header or after nothing."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable

import torch

from ...errors import ProtocolError

LOCAL_STEP_BYTES = 8 << 20
"""Bytes between two checks of the deadline: a local file system needs a few milliseconds for them."""
_REMOTE_STEP_BYTES = 64 << 20
"""Most bytes of one request, and of the copy that it needs."""
_HEADER_LENGTH = struct.Struct("<Q")
"""The first bytes of a safetensors file: the length of the header that follows."""
_PART = "filesystem engine"


def byte_view(data: torch.Tensor) -> memoryview:
    """Return a view of the memory of a contiguous CPU tensor, without NumPy. Valid while `data` exists."""
    if not data.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())).cast("B")


def read_local_payload(path: str, data: memoryview, offset: int, total: int, check: Callable[[], None]) -> None:
    """Fill `data` with the bytes from `offset` on of the payload of `total` bytes in a local file.

    `check` is called between steps and raises an error when it is time to stop. Raises `ProtocolError` for a file of another
    size, or OSError.
    """
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123
        size = os.fstat(file.fileno()).st_size
        _check_size(path, size, total, file.read(_HEADER_LENGTH.size))
        file.seek(size - total + offset)
        rest = data
        while rest:
            check()
            count = file.readinto(rest[:LOCAL_STEP_BYTES])
            if not count:
                raise _truncated(path)
            rest = rest[count:]


def read_remote_payload(
    path: str, size: int, data: memoryview, offset: int, total: int, read: Callable[[int, int], bytes]
) -> None:
    """Fill `data` as `read_local_payload` does, from a remote file of `size` bytes. ``read(start, stop)`` requests a range."""

    def checked_read(start: int, stop: int) -> bytes:
        content = read(start, stop)
        if len(content) != stop - start:
            raise _truncated(path)
        return content

    first = size - total + offset
    position, last = first, first + data.nbytes
    if offset:
        _check_size(path, size, total, checked_read(0, min(size, _HEADER_LENGTH.size)))
    elif size <= total:
        _check_size(path, size, total, b"")
    else:
        position = 0  # one request gets the header together with the first bytes behind it
    while position < last:
        stop = min(last, position + _REMOTE_STEP_BYTES)
        content = checked_read(position, stop)
        if position == 0:
            _check_size(path, size, total, content[: _HEADER_LENGTH.size])
        low = max(position, first)
        if low < stop:
            data[low - first : stop - first] = content[low - position :]
        position = stop


def _check_size(path: str, size: int, total: int, start: bytes) -> None:
    """Raise `ProtocolError` unless the file holds only the `total` bytes of the payload, or a safetensors header and these."""
    ahead = size - total
    if ahead == 0:
        return
    if ahead < _HEADER_LENGTH.size:
        raise ProtocolError(f"{path} has {size} bytes, expected {total}.", part=_PART)
    header = _HEADER_LENGTH.unpack(start)[0] if len(start) == _HEADER_LENGTH.size else -1
    if _HEADER_LENGTH.size + header != ahead:
        message = f"{path} has {size} bytes: neither {total} nor a safetensors header and {total}."
        raise ProtocolError(message, part=_PART)


def _truncated(path: str) -> ProtocolError:
    return ProtocolError(f"{path} was truncated while it was read.", part=_PART)
