"""Files with the bytes of buckets: a file's payload is its end, after a safetensors header or after nothing.

A `PartialFile` is written bucket by bucket and appears under its name, complete, when it is finished. Its writer calls `finish`
or `discard`, and only `discard` after any error.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import struct
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import torch

from ...errors import ProtocolError, StorageError

LOCAL_STEP_BYTES = 8 << 20
"""Bytes between two checks of the deadline: a local file system needs a few milliseconds for them."""
_REMOTE_STEP_BYTES = 64 << 20
"""Most bytes of one request, and of the copy that it needs."""
_HEADER_LENGTH = struct.Struct("<Q")
"""The first bytes of a safetensors file: the length of the header that follows."""
UNFINISHED = ".part"
"""End of the name of a file that is not complete."""
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


Check = Callable[[], None]
"""Raises an error when it is time to stop."""
_TRIES = 10
"""How often a directory that vanishes is made."""


class LocalPartialFile:
    """A file on the operating system's file system, under a temporary name until it is renamed."""

    def __init__(self, final: str, *, fsync: bool) -> None:
        self.final = final
        """Path under which the finished file appears."""
        self._fsync = fsync
        self._folder = os.path.dirname(final)  # noqa: PTH120
        self._unfinished = _unfinished(final)
        self._file = self._opened()

    def _opened(self) -> BinaryIO:
        """Open the file, and make its directory, which the check of another process may be removing as it is empty."""
        for _ in range(_TRIES):
            with contextlib.suppress(FileExistsError, FileNotFoundError):
                os.makedirs(self._folder, exist_ok=True)  # noqa: PTH103
                return open(self._unfinished, "wb", buffering=0)  # noqa: PTH123
        return open(self._unfinished, "wb", buffering=0)  # noqa: PTH123 - closed by finish and discard

    def write(self, content: Sequence[bytes | memoryview], check: Check) -> None:
        """Append `content`. Calls `check` every few MiB."""
        for chunk in content:
            rest = memoryview(chunk)
            while rest:
                check()
                rest = rest[self._file.write(rest[:LOCAL_STEP_BYTES]) :]

    def finish(self) -> None:
        """Make the file visible. It replaces any other file of that name."""
        if self._fsync:
            os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._unfinished, self.final)  # noqa: PTH105
        if self._fsync:
            directory = os.open(self._folder, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def discard(self) -> None:
        """Remove the file. Idempotent, never raises."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._unfinished)  # noqa: PTH108


class RemotePartialFile:
    """A file on any other file system: an upload in parts, visible once completed, or a temporary file that is then renamed.

    `atomic` tells whether an upload is: no part of the file is visible before it is completed.
    """

    def __init__(self, fs: Any, final: str, *, atomic: bool) -> None:
        self.final = final
        self._fs = fs
        self._target = final if atomic else _unfinished(final)
        if not atomic:
            fs.makedirs(final.rpartition("/")[0], exist_ok=True)
        self._file = fs.open(self._target, "wb")

    def write(self, content: Sequence[bytes | memoryview], check: Check) -> None:
        """Append `content`. Copies `content`, and uploads the copies once they are enough for a part of the upload."""
        for chunk in content:
            check()
            self._file.write(bytes(chunk))

    def finish(self) -> None:
        """See `LocalPartialFile.finish`."""
        self._file.close()
        if self._target != self.final:
            self._fs.mv(self._target, self.final)
            # webhdfs answers false to a rename onto a file, and fsspec drops the answer.
            if self._fs.exists(self._target):
                hint = "Use an object store, or a file system that is mounted on every host, as checkpoint_engine.options.path."
                raise StorageError(f"a rename did not replace {self.final}.", part=_PART, hint=hint)

    def discard(self) -> None:
        """See `LocalPartialFile.discard`."""
        if self._target == self.final:
            with contextlib.suppress(Exception):
                self._file.discard()
            with contextlib.suppress(Exception):
                self._file.closed = True  # its destructor would close the upload, which completes it
        else:
            with contextlib.suppress(Exception):
                self._file.close()
            with contextlib.suppress(Exception):
                self._fs.rm(self._target)


PartialFile = LocalPartialFile | RemotePartialFile


def _unfinished(final: str) -> str:
    """Return a temporary name that no other writer uses, since two processes may write the same file."""
    return f"{final}.{secrets.token_hex(4)}{UNFINISHED}"
