"""`StoreDirectory`: a directory on a local or remote file system, with the few operations the filesystem engine needs.

Nothing here relies on complete listings, on modification times or on locks, none of which network file systems promise. They do
promise that a rename within a directory, or the upload of an object, is atomic.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import fsspec

from ...errors import ClosedError, ConfigError, DeadlineExceededError, StorageError, WeightlaneError
from ...waits import Deadline, Lifecycle, run_bounded
from .bucket_files import LocalPartialFile, PartialFile, RemotePartialFile, read_local_payload, read_remote_payload
from .config import LOCAL

_T = TypeVar("_T")
_PUT_IS_ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"})
"""Protocols of object stores, where an upload is atomic."""
_PART = "filesystem engine"
_HINTS = {
    errno.ENOSPC: "Free some space there, or set another checkpoint_engine.options.path.",
    errno.EDQUOT: "Free some space there, or set another checkpoint_engine.options.path.",
    errno.EFBIG: "Allow larger files there, or set another checkpoint_engine.options.path.",
}
_PARTICIPLES = {"read": "read", "list": "listed", "remove": "removed"}
_pending_writes: dict[tuple[str, str], threading.Event] = {}
"""The running write that makes a file appear, by protocol and file, even if its caller has given up. The event is set when the
write has ended. There is one table per process, since a new connection writes the same files as the one before it."""
_pending_writes_lock = threading.Lock()


def _end_write(file: tuple[str, str], ended: threading.Event) -> None:
    with _pending_writes_lock:
        del _pending_writes[file]
    ended.set()


@dataclass(frozen=True, slots=True)
class Guard:
    """The deadline of a file operation, and the lifecycle whose closing interrupts it."""

    life: Lifecycle
    deadline: Deadline
    peer: str = ""
    """The participant that the operation waits for, for error messages."""

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

    def sleep(self, seconds: float) -> None:
        """Pause, but not beyond the deadline. Raises `ClosedError` as soon as the half is closed."""
        end = self.deadline.within(seconds)
        while not end.expired:  # the `ring` of an earlier remote operation may end a wait early
            self.life.wait({}, end.remaining_s)

    def _too_late(self, waiting_for: str) -> DeadlineExceededError:
        hint = "Check the file system, and that the sender is alive; or allow more time."
        return self.deadline.error(waiting_for, part=self.life.part, peer=self.peer, hint=hint)


@contextlib.contextmanager
def standalone_guard(part: str, deadline: Deadline) -> Iterator[Guard]:
    """Yield a guard for work outside of a half, or of a half that is already closed."""
    life = Lifecycle(part, lambda: None)
    try:
        yield Guard(life, deadline)
    finally:
        life.close()


class StoreDirectory:
    """The directory at an fsspec `url`, or a path. Paths are relative to it and use slashes.

    A file appears under its name only when it is complete: by a rename, or on object stores by the upload itself. The first
    operation connects to the store. Each operation may raise `StorageError`, `DeadlineExceededError` or `ClosedError`.

    Remote operations run in a thread that is abandoned when the deadline passes. Local ones check the deadline every few MiB; one
    that hangs in the kernel, because an NFS server is gone and the mount is ``hard``, cannot be interrupted.

    `storage_options` are arguments of the file system's class in fsspec. With `fsync` every file is flushed to the disk before it
    appears (local paths only). Raises `ConfigError` when the URL's file system is unknown or its package is not installed.
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
        self.is_local = protocol in LOCAL
        """Whether this is the operating system's own file system, which includes NFS mounts."""
        self._put_is_atomic = protocol in _PUT_IS_ATOMIC
        self._protocol = protocol
        self._fs: Any = None
        self._root = ""

    def _located(self, path: str, guard: Guard) -> str:
        """Return the result of `full`, once the store is open. Raises as any operation."""
        if self._fs is None:
            with self._typed("open", self._url):
                self._root, self._fs = self._call(self._open, guard, f"{self._url} to be opened")
        return self.full(path)

    def _open(self) -> tuple[str, Any]:
        try:
            fs, root = fsspec.core.url_to_fs(self._url, use_listings_cache=False, **self._options)
        except (ImportError, ValueError, TypeError) as error:
            raise self._unusable(error) from error
        return str(root), fs

    def _unusable(self, error: Exception) -> ConfigError:
        return ConfigError(
            f"path {self._url!r} cannot be used: {error}.",
            part=_PART,
            hint="pip install 'weightlane[fs]' has S3; other fsspec protocols need their own package.",
        )

    def full(self, path: str) -> str:
        """Return the absolute path of `path` in its file system, which an earlier operation has opened."""
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    def write(self, path: str, content: Sequence[bytes | memoryview], guard: Guard) -> None:
        """Write `content` to a file that replaces any other of that name. A failed write makes no new file."""
        if self._put_is_atomic:
            final, joined = self._located(path, guard), b"".join(content)  # a copy for the reason given in `append`
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
        """Write a small text file as `write` does."""
        self.write(path, [text.encode()], guard)

    def begin(self, path: str, guard: Guard) -> PartialFile:
        """Begin a file that `append` writes to and `finish` makes visible."""
        final = self._located(path, guard)
        with self._typed("write", final):
            if self.is_local:
                return LocalPartialFile(final, fsync=self._fsync)
            waiting_for = f"{final} to be opened"
            return self._call(
                lambda: RemotePartialFile(self._fs, final, atomic=self._put_is_atomic), guard, waiting_for
            )

    def append(self, file: PartialFile, content: Sequence[bytes | memoryview], guard: Guard) -> None:
        """Write `content` at the end of `file`."""
        waiting_for = f"{file.final} to be written"

        def check() -> None:
            guard.check(waiting_for)

        with self._typed("write", file.final):
            if self.is_local:
                file.write(content, check)
            else:
                joined = b"".join(content)  # a copy: an abandoned upload must not read the caller's memory
                self._call(lambda: file.write([joined], check), guard, waiting_for)

    def finish(self, file: PartialFile, guard: Guard) -> None:
        """Make `file` visible under its name. It replaces any other file of that name."""
        with self._typed("write", file.final):
            self._in_turn(file.final, file.finish, guard)

    def in_doubt(self, path: str) -> bool:
        """Whether an abandoned write of this file still runs, so that the file may still appear or be replaced."""
        with _pending_writes_lock:
            return (self._protocol, self.full(path)) in _pending_writes

    def _in_turn(self, final: str, operation: Callable[[], None], guard: Guard) -> None:
        """Run `operation`, which makes a file appear, after all earlier writes of that file.

        So an abandoned write never replaces a later one. A caller abandons a remote write that exceeds its deadline. When a local
        write is stuck in the kernel, the thread that waits for its caller abandons it.
        """
        waiting_for, file, ended = f"{final} to be written", (self._protocol, final), threading.Event()
        while True:
            with _pending_writes_lock:
                before = _pending_writes.setdefault(file, ended)
            if before is ended:
                break
            guard.run(before.wait, f"an earlier write of {final}, which was abandoned, to end")
        try:
            guard.check(waiting_for)
        except BaseException:
            _end_write(file, ended)
            raise

        def appear() -> None:
            try:
                operation()
            finally:
                _end_write(file, ended)

        if self.is_local:
            appear()
        else:
            guard.run(appear, waiting_for)

    def discard(self, file: PartialFile, part: str, deadline: Deadline) -> None:
        """Remove an unfinished `file` of the half `part`. Never raises; a slow removal continues in the background."""
        if self.is_local:
            file.discard()
            return
        with standalone_guard(part, deadline) as guard, contextlib.suppress(WeightlaneError):
            guard.run(file.discard, f"{file.final} to be removed")

    def read_payload(self, path: str, data: memoryview, guard: Guard, offset: int, total: int) -> bool:
        """Fill `data` with the bytes from `offset` on of the file's payload, its last `total` bytes.

        Returns False when there is no such file yet. Raises `ProtocolError` when the file is neither the payload by itself nor a
        safetensors header and the payload.
        """
        final = self._located(path, guard)
        waiting_for = f"{final} to be read"

        def request(start: int, stop: int) -> bytes:
            return bytes(self._call(lambda: self._fs.cat_file(final, start=start, end=stop), guard, waiting_for))

        with self._typed("read", final):
            try:
                if self.is_local:
                    read_local_payload(final, data, offset, total, lambda: guard.check(waiting_for))
                else:
                    size = int(self._call(lambda: self._fs.info(final)["size"], guard, waiting_for))
                    read_remote_payload(final, size, data, offset, total, request)
            except OSError as error:
                if _is_missing(error):
                    return False
                raise
        return True

    def read_text(self, path: str, guard: Guard) -> str | None:
        """Return a small file's text, undecodable bytes replaced; None when there is no such file."""
        content = self._unless_missing("read", path, lambda final: bytes(self._fs.cat_file(final)), guard)
        return None if content is None else content.decode(errors="replace")

    def names(self, path: str, guard: Guard) -> list[str]:
        """Return the names of a directory's entries. They may be out of date or incomplete, and serve only to find leftovers."""

        def entries(final: str) -> list[str]:
            with contextlib.suppress(NotADirectoryError):
                return [str(entry).rstrip("/").rpartition("/")[2] for entry in self._fs.ls(final, detail=False)]
            return []

        return sorted(self._unless_missing("list", path, entries, guard) or [])

    def look_again(self, path: str) -> None:
        """Make an NFS client forget that the directory `path`, or a file in it, did not exist.

        Opening a directory makes the client compare its cached entries with the server's.
        """
        if self.is_local:
            parts = path.split("/")
            for depth in range(len(parts) + 1):
                with contextlib.suppress(OSError), os.scandir(self.full("/".join(parts[:depth]))):
                    pass

    def remove(self, path: str, guard: Guard) -> None:
        """Remove a file, if it exists."""
        self._unless_missing("remove", path, lambda final: self._fs.rm(final, recursive=False), guard)

    def remove_tree(self, path: str, guard: Guard) -> None:
        """Remove a directory and all files in it, if it exists."""
        self._unless_missing("remove", path, lambda final: self._fs.rm(final, recursive=True), guard)

    def remove_if_empty(self, path: str, guard: Guard) -> None:
        """Remove a directory without entries. Object stores have no directories."""
        self._remove_if_empty(self._located(path, guard), guard)

    def _remove_if_empty(self, final: str, guard: Guard) -> None:
        if not self._put_is_atomic:
            with contextlib.suppress(StorageError), self._typed("remove", final):
                self._call(lambda: self._fs.rmdir(final), guard, f"{final} to be removed")

    @contextlib.contextmanager
    def without_new_directories(self, guard: Guard) -> Iterator[None]:
        """Remove at the end the store's directory and those above it, as far as they are empty and were not there before."""
        directory, new = self._located("", guard).rstrip("/"), list[str]()
        if self._put_is_atomic:
            directory = ""  # object stores have none
        while directory and not self._call(partial(self._fs.exists, directory), guard, f"{directory} to be found"):
            new.append(directory)
            directory = directory.rpartition("/")[0]
        try:
            yield
        finally:
            for each in new:
                self._remove_if_empty(each, guard)

    def _unless_missing(self, action: str, path: str, operation: Callable[[str], _T], guard: Guard) -> _T | None:
        """Call `operation` with the full path. Returns None when there is no such file."""
        final = self._located(path, guard)
        with self._typed(action, final):
            try:
                return self._call(lambda: operation(final), guard, f"{final} to be {_PARTICIPLES[action]}")
            except OSError as error:
                if _is_missing(error):
                    return None
                raise

    def _call(self, operation: Callable[[], _T], guard: Guard, waiting_for: str) -> _T:
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
            suspect = "the path's permissions" if self.is_local else "the store's endpoint and credentials"
            hint = _HINTS.get(getattr(error, "errno", None) or 0, f"Check {suspect}.")
            raise StorageError(f"cannot {action} {path}: {reason}.", part=_PART, hint=hint) from error


def _is_missing(error: OSError) -> bool:
    # ESTALE: another NFS client has replaced or removed the file, and this one still had the old one cached.
    return isinstance(error, FileNotFoundError) or error.errno == errno.ESTALE
