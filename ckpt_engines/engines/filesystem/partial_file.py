"""`PartialFile`: a file that is written bucket by bucket and appears under its name, complete, when it is finished.

Its writer calls `finish` or `discard`, and only `discard` after any error.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from .payload_file import LOCAL_STEP_BYTES

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
    return f"{final}.{secrets.token_hex(4)}.part"
