"""A directory of files on a local or remote file system, with the few operations the filesystem engine needs.

Nothing here relies on a listing being complete, on modification times or on locks, none of which network file systems
promise. What they do promise is that a rename within a directory, or the upload of an object, happens as a whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import fsspec
import torch

from ...deadline import Deadline
from ...errors import (
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    ProtocolError,
    StorageError,
    WeightlaneError,
)
from ...runtime.lifecycle import Lifecycle
from ...toolkit.waiting import run_bounded
from .partial_file import LOCAL_STEP_BYTES, LocalPartialFile, PartialFile, RemotePartialFile

_T = TypeVar("_T")
_LOCAL = frozenset({"file", "local"})
_PUT_IS_ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"})
_PART = "filesystem engine"
_REMOTE_STEP_BYTES = 64 << 20
"""Of one request, and of the copy that it needs."""
_HEADER_LENGTH = struct.Struct("<Q")
"""How a safetensors file begins: the length of the header that follows."""
_HINTS = {
    errno.ENOSPC: "Free some space there, or set another checkpoint_engine.options.path.",
    errno.EDQUOT: "Free some space there, or set another checkpoint_engine.options.path.",
    errno.EFBIG: "Allow larger files there, or set another checkpoint_engine.options.path.",
}


@dataclass(frozen=True, slots=True)
class Guard:
    """By when an operation must have ended, and whose closing interrupts it."""

    life: Lifecycle
    deadline: Deadline
    peer: str = ""
    """Who is waited for, for error messages."""

    def check(self, waiting_for: str) -> None:
        """Raise `DeadlineExceededError` or `ClosedError` when it is time to stop."""
        if self.life.closed:
            raise ClosedError("it was closed while a call was running.", part=self.life.part)
        if self.deadline.expired:
            raise self._too_late(waiting_for)

    def run(self, operation: Callable[[], _T], waiting_for: str) -> _T:
        """Call an `operation` that cannot be interrupted, in a thread that is left behind when it is time to stop."""
        try:
            return run_bounded(operation, self.life, self.deadline, waiting_for)
        except DeadlineExceededError as error:
            raise self._too_late(waiting_for) from error

    def _too_late(self, waiting_for: str) -> DeadlineExceededError:
        hint = "Check the file system, and that the sender is alive; or allow more time."
        return self.deadline.error(waiting_for, part=self.life.part, peer=self.peer, hint=hint)

    def sleep(self, seconds: float) -> None:
        """Pause, but not beyond the deadline. Raises `ClosedError` as soon as the half is closed."""
        end = self.deadline.within(seconds)
        while not end.expired:  # a remote operation may have left the bell rung, which ends a wait early
            self.life.wait({}, end.remaining_s)


@contextlib.contextmanager
def standalone_guard(part: str, deadline: Deadline) -> Iterator[Guard]:
    """A guard for work that belongs to no half, or to one that is closed already."""
    life = Lifecycle(part, lambda: None)
    try:
        yield Guard(life, deadline)
    finally:
        life.close()


_pending_writes: dict[tuple[str, str], threading.Event] = {}
"""By protocol and file: the write under way that lets it appear, whether or not somebody still waits for that. Its event is set
when it has ended. One table for the whole process, since a new connection writes the same files as the one before it."""
_pending_writes_lock = threading.Lock()


def _has_ended(file: tuple[str, str], ended: threading.Event) -> None:
    with _pending_writes_lock:
        del _pending_writes[file]
    ended.set()


class StoreDirectory:
    """The directory at an fsspec `url`. Paths are relative to it and use slashes.

    A file appears under its name only when it is complete: by a rename, or on object stores by the upload itself. Connects
    to nothing before its first operation. Each operation may raise `StorageError`, `DeadlineExceededError` or `ClosedError`.

    Remote operations run in a thread that is left behind when the deadline passes. Local ones look at the deadline every few
    MiB; one that hangs in the kernel, because an NFS server is gone and the mount is ``hard``, cannot be interrupted.

    Args:
        url: A path, or an fsspec URL.
        storage_options: What fsspec passes on to the file system's class.
        fsync: Flush every file to the disk before it appears (local paths only).

    Raises:
        ConfigError: The URL's file system is unknown or its package is not installed.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None, *, fsync: bool = False) -> None:
        self._url = url
        self._options = dict(storage_options or {})
        self._fsync = fsync
        chained, _, rest = url.partition("::")
        protocol = chained if rest else fsspec.core.split_protocol(url)[0] or "file"
        try:
            fsspec.get_filesystem_class(protocol)
        except (ImportError, ValueError) as error:
            raise self._unusable(error) from error
        self.is_local = protocol in _LOCAL
        """Whether this is the operating system's own file system, which includes NFS mounts."""
        self._put_is_atomic = protocol in _PUT_IS_ATOMIC
        self._protocol = protocol

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        try:
            fs, root = fsspec.core.url_to_fs(self._url, use_listings_cache=False, **self._options)
        except (ImportError, ValueError, TypeError) as error:
            raise self._unusable(error) from error
        return fs, str(root)

    @property
    def _fs(self) -> Any:
        return self._opened[0]

    def _unusable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"path {self._url!r} cannot be used: {error}.",
            part=_PART,
            hint="pip install 'weightlane[fs]' has S3; other fsspec protocols need their own package.",
        )

    def full(self, path: str) -> str:
        """Path as the file system knows it."""
        root = self._opened[1]
        return f"{root.rstrip('/')}/{path}" if path else root

    def write(self, path: str, content: Sequence[bytes | memoryview], guard: Guard) -> None:
        """Write `content`, piece after piece, to a file that replaces any of that name. When that fails there is no new file."""
        if self._put_is_atomic:
            final, joined = self.full(path), b"".join(content)  # copied, as in `append`
            with self._typed("write", final):
                self._in_turn(final, lambda: self._fs.pipe_file(final, joined), guard)
            return
        file = self.begin(path, guard)
        try:
            self.append(file, content, guard)
            self.finish(file, guard)
        except BaseException:
            self.discard(file, guard.life.part, guard.deadline)
            raise

    def write_text(self, path: str, text: str, guard: Guard) -> None:
        """`write` for a small file."""
        self.write(path, [text.encode()], guard)

    def begin(self, path: str, guard: Guard) -> PartialFile:
        """Begin a file that is written piece by piece; see `append` and `finish`."""
        final = self.full(path)
        with self._typed("write", final):
            if self.is_local:
                return LocalPartialFile(final, fsync=self._fsync)
            waiting_for = f"{final} to be begun"
            return self._remotely(
                lambda: RemotePartialFile(self._fs, final, atomic=self._put_is_atomic), guard, waiting_for
            )

    def append(self, file: PartialFile, content: Sequence[bytes | memoryview], guard: Guard) -> None:
        """Write `content` behind what `file` has."""
        waiting_for = f"{file.final} to be written"

        def check() -> None:
            guard.check(waiting_for)

        with self._typed("write", file.final):
            if self.is_local:
                file.write(content, check)
            else:
                joined = b"".join(content)  # a copy: an abandoned upload must not read the caller's memory
                self._remotely(lambda: file.write([joined], check), guard, waiting_for)

    def finish(self, file: PartialFile, guard: Guard) -> None:
        """Let `file` appear, in the place of any other of that name."""
        with self._typed("write", file.final):
            self._in_turn(file.final, file.finish, guard)

    def in_doubt(self, path: str) -> bool:
        """Whether a write of this file that was given up goes on behind its caller: it may still appear, or be replaced."""
        with _pending_writes_lock:
            return (self._protocol, self.full(path)) in _pending_writes

    def _in_turn(self, final: str, operation: Callable[[], None], guard: Guard) -> None:
        """Let a file appear, after any earlier one of that name: one that was given up must not replace a later one.

        A remote one is given up by the caller, a local one by whoever waits for the thread that is stuck in the kernel.
        """
        waiting_for, file, ended = f"{final} to be written", (self._protocol, final), threading.Event()
        while True:
            with _pending_writes_lock:
                before = _pending_writes.setdefault(file, ended)
            if before is ended:
                break
            guard.run(before.wait, f"an earlier write of {final}, which was given up, to end")
        try:
            guard.check(waiting_for)
        except BaseException:
            _has_ended(file, ended)
            raise

        def appear() -> None:
            try:
                operation()
            finally:
                _has_ended(file, ended)

        if self.is_local:
            appear()
        else:
            guard.run(appear, waiting_for)

    def discard(self, file: PartialFile, part: str, deadline: Deadline) -> None:
        """Let nothing of `file` remain, for the half `part`. Never raises; where it takes longer it goes on behind the caller."""
        if self.is_local:
            file.discard()
            return
        with standalone_guard(part, deadline) as guard, contextlib.suppress(WeightlaneError):
            guard.run(file.discard, f"{file.final} to be removed")

    def read_payload(self, path: str, data: memoryview, guard: Guard, offset: int, total: int) -> bool:
        """Fill `data` with what lies `offset` bytes into a file's payload; False when there is no such file yet.

        The payload is the last `total` bytes of the file. Ahead of it there may be nothing, or a safetensors header.
        `ProtocolError` when the file has any other size.
        """
        final = self.full(path)
        with self._typed("read", final):
            try:
                if self.is_local:
                    self._read_local(final, data, guard, offset, total)
                else:
                    self._read_remote(final, data, guard, offset, total)
            except OSError as error:
                if _is_missing(error):
                    return False
                raise
        return True

    def _read_local(self, final: str, data: memoryview, guard: Guard, offset: int, total: int) -> None:
        with open(final, "rb", buffering=0) as file:  # noqa: PTH123
            size = os.fstat(file.fileno()).st_size
            _check_size(final, size, total, file.read(_HEADER_LENGTH.size))
            file.seek(size - total + offset)
            rest = data
            while rest:
                guard.check(f"{final} to be read")
                count = file.readinto(rest[:LOCAL_STEP_BYTES])
                if not count:
                    raise _cut_off(final)
                rest = rest[count:]

    def _read_remote(self, final: str, data: memoryview, guard: Guard, offset: int, total: int) -> None:
        waiting_for = f"{final} to be read"

        def read(start: int, stop: int) -> bytes:
            piece = self._remotely(lambda: self._fs.cat_file(final, start=start, end=stop), guard, waiting_for)
            if len(piece) != stop - start:
                raise _cut_off(final)
            return bytes(piece)

        size = int(self._remotely(lambda: self._fs.info(final)["size"], guard, waiting_for))
        first = size - total + offset
        place, last = first, first + data.nbytes
        if offset:
            _check_size(final, size, total, read(0, min(size, _HEADER_LENGTH.size)))
        elif size <= total:
            _check_size(final, size, total, b"")
        else:
            place = 0  # the header comes along with what is behind it, in one request
        while place < last:
            stop = min(last, place + _REMOTE_STEP_BYTES)
            piece = read(place, stop)
            if place == 0:
                _check_size(final, size, total, piece[: _HEADER_LENGTH.size])
            low = max(place, first)
            if low < stop:
                data[low - first : stop - first] = piece[low - place :]
            place = stop

    def read_text(self, path: str, guard: Guard) -> str | None:
        """A small file's text, undecodable bytes replaced; None when there is no such file."""
        final = self.full(path)
        with self._typed("read", final):
            try:
                content = self._remotely(lambda: self._fs.cat_file(final), guard, f"{final} to be read")
            except OSError as error:
                if _is_missing(error):
                    return None
                raise
            return bytes(content).decode(errors="replace")

    def names(self, path: str, guard: Guard) -> list[str]:
        """Names of what is in a directory. May be out of date or incomplete: good only for finding things to clean up."""
        final = self.full(path)
        with self._typed("list", final):
            try:
                entries = self._remotely(lambda: self._fs.ls(final, detail=False), guard, f"{final} to be listed")
            except OSError as error:
                if _is_missing(error) or isinstance(error, NotADirectoryError):
                    return []
                raise
            return sorted(str(entry).rstrip("/").rpartition("/")[2] for entry in entries)

    def look_again(self, path: str) -> None:
        """Make an NFS client forget that the directory `path`, or a file in it, did not exist.

        Opening a directory makes it compare what it remembers of that directory with the server's.
        """
        if self.is_local:
            parts = path.split("/")
            for depth in range(len(parts) + 1):
                with contextlib.suppress(OSError), os.scandir(self.full("/".join(parts[:depth]))):
                    pass

    def remove(self, path: str, guard: Guard) -> None:
        """Remove a file; nothing happens when it does not exist."""
        self._remove(path, guard, recursive=False)

    def remove_tree(self, path: str, guard: Guard) -> None:
        """Remove a directory and all in it; nothing happens when it does not exist."""
        self._remove(path, guard, recursive=True)

    def _remove(self, path: str, guard: Guard, *, recursive: bool) -> None:
        final = self.full(path)
        with self._typed("remove", final):
            try:
                self._remotely(lambda: self._fs.rm(final, recursive=recursive), guard, f"{final} to be removed")
            except OSError as error:
                if not _is_missing(error):
                    raise

    def remove_if_empty(self, path: str, guard: Guard) -> None:
        """Remove a directory unless somebody still uses it. Object stores have none."""
        if not self._put_is_atomic:
            final = self.full(path)
            with contextlib.suppress(OSError):
                self._remotely(lambda: self._fs.rmdir(final), guard, f"{final} to be removed")

    def _remotely(self, operation: Callable[[], _T], guard: Guard, waiting_for: str) -> _T:
        guard.check(waiting_for)
        return operation() if self.is_local else guard.run(operation, waiting_for)

    @contextlib.contextmanager
    def _typed(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except WeightlaneError:
            raise
        except Exception as error:
            if self.is_local and not isinstance(error, OSError):
                raise
            reason = (error.strerror if isinstance(error, OSError) else "") or f"{type(error).__name__}: {error}"
            there = "the path's permissions" if self.is_local else "the store's endpoint and credentials"
            hint = _HINTS.get(getattr(error, "errno", None) or 0, f"Check {there}.")
            raise StorageError(f"cannot {action} {path}: {reason}.", part=_PART, hint=hint) from error


def byte_view(data: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without NumPy. Valid while `data` lives."""
    return (
        memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())).cast("B")
        if data.numel()
        else memoryview(b"")
    )


def _is_missing(error: OSError) -> bool:
    # ESTALE: an NFS client still knew the file that another one has replaced or removed.
    return isinstance(error, FileNotFoundError) or error.errno == errno.ESTALE


def _check_size(path: str, size: int, payload: int, start: bytes) -> None:
    """`ProtocolError` unless the file is `payload` bytes behind nothing or behind a whole safetensors header."""
    ahead = size - payload
    if ahead == 0:
        return
    if ahead < _HEADER_LENGTH.size:
        raise ProtocolError(f"{path} has {size} bytes, expected {payload}.", part=_PART)
    header = _HEADER_LENGTH.unpack(start)[0] if len(start) == _HEADER_LENGTH.size else -1
    if _HEADER_LENGTH.size + header != ahead:
        message = f"{path} has {size} bytes: neither {payload} nor a safetensors header and {payload}."
        raise ProtocolError(message, part=_PART)


def _cut_off(path: str) -> ProtocolError:
    return ProtocolError(f"{path} was cut off while it was read.", part=_PART)
