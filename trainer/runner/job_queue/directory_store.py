"""`DirectoryStore`: files of a directory in the place of a store's objects."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from weightlane.ckpt_engines import StorageError, WeightlaneError

_PARTIAL = ".partial"
_LOCK = "worker"
"""The file whose lock (flock) says that a worker has the turn. The kernel drops the lock of a process that has ended."""
_ABANDONED_S = 86400.0
"""Age of a half-written file whose writer is taken for dead: no write takes so long."""


class DirectoryStore:
    """Files below a directory, which is made if there is none. Keys are paths relative to it.

    It is on a file system of this machine, or one whose locks (flock) hold between all processes that use it. Every method raises
    `StorageError` if the file system refuses.
    """

    permanent_errors = True
    """See `ObjectStore.permanent_errors`."""

    def __init__(self, directory: Path) -> None:
        self.url = str(directory)
        self._folder, self._lock = directory, -1
        with self._typed():
            directory.mkdir(parents=True, exist_ok=True)

    def read(self, key: str) -> bytes | None:
        """Content of a file; None if there is none."""
        with self._typed():
            try:
                return (self._folder / key).read_bytes()
            except FileNotFoundError:
                return None

    def read_tagged(self, key: str, timeout_s: float | None = None) -> tuple[bytes, str] | None:  # noqa: ARG002 - a store's
        """See `ObjectStore.read_tagged`. The tag is a digest of the content."""
        found = self.read(key)
        return None if found is None else (found, hashlib.sha256(found).hexdigest())

    def write(self, key: str, data: bytes) -> None:
        """Write a file so that it appears completely or not at all, also if the machine crashes."""
        path = self._folder / key
        unfinished = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_PARTIAL}")
        with self._typed():
            path.parent.mkdir(exist_ok=True)
            try:
                with unfinished.open("wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
                unfinished.replace(path)
            except OSError:
                unfinished.unlink(missing_ok=True)
                raise
            folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def swap(self, key: str, data: bytes, etag: str | None, timeout_s: float | None = None) -> str | None:  # noqa: ARG002
        """See `ObjectStore.swap`. Only the process that has the lock may call it."""
        found = self.read_tagged(key)
        if etag != (None if found is None else found[1]):
            return None
        self.write(key, data)
        return hashlib.sha256(data).hexdigest()

    def delete(self, key: str) -> None:
        """Delete a file, if there is one."""
        with self._typed():
            (self._folder / key).unlink(missing_ok=True)

    def names(self, folder: str) -> list[str]:
        """The names of the files in `folder`, in order."""
        with self._typed():
            return sorted(path.name for path in (self._folder / folder).glob("[!.]*"))

    def lock(self) -> bool:
        """See `ObjectStore.lock`. The first call that succeeds deletes what dead processes have left half-written."""
        if self._lock >= 0:
            return True
        with self._typed():
            descriptor = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                return False
            self._lock = descriptor
            for path in self._folder.glob(f"**/.*{_PARTIAL}"):
                with suppress(FileNotFoundError):  # it has got its name
                    if path.stat().st_mtime < time.time() - _ABANDONED_S:
                        path.unlink()
        return True

    def unlock(self) -> None:
        """See `ObjectStore.unlock`."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextmanager
    def _typed(self) -> Iterator[None]:
        try:
            yield
        except WeightlaneError:
            raise
        except OSError as error:
            raise StorageError(
                f"{self._folder} cannot be used: {error.strerror or error}.",
                part="job directory",
                hint="Free space, or choose another one.",
            ) from error
