"""Files that are written piece by piece and appear under their names when they are finished, as a whole."""

from __future__ import annotations

import contextlib
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

LOCAL_STEP_BYTES = 8 << 20
"""Between two looks at the deadline."""

Check = Callable[[], None]
"""Raises when it is time to stop."""


class PartialFile(ABC):
    """A file on its way. Whoever begins one calls `finish` or `discard`; after any error only `discard`."""

    def __init__(self, final: str) -> None:
        self.final = final
        """Where it will be."""

    @abstractmethod
    def write(self, content: Sequence[bytes | memoryview], check: Check) -> None:
        """Append `content`, piece after piece."""

    @abstractmethod
    def finish(self) -> None:
        """Let it appear, in the place of any other of that name."""

    @abstractmethod
    def discard(self) -> None:
        """Let nothing of it remain. Idempotent, never raises."""


class LocalPartialFile(PartialFile):
    """On the operating system's file system: under a temporary name until it is renamed."""

    def __init__(self, final: str, *, fsync: bool) -> None:
        super().__init__(final)
        self._fsync = fsync
        self._folder = os.path.dirname(final)  # noqa: PTH120
        self._unfinished = _unfinished(final)
        os.makedirs(self._folder, exist_ok=True)  # noqa: PTH103
        self._file: BinaryIO = open(self._unfinished, "wb", buffering=0)  # noqa: SIM115, PTH123 - closed by finish and discard

    def write(self, content: Sequence[bytes | memoryview], check: Check) -> None:
        """See `PartialFile.write`. Looks at the deadline every few MiB."""
        for piece in content:
            rest = memoryview(piece)
            while rest:
                check()
                rest = rest[self._file.write(rest[:LOCAL_STEP_BYTES]) :]

    def finish(self) -> None:
        """See `PartialFile.finish`."""
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
        """See `PartialFile.discard`."""
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            os.unlink(self._unfinished)  # noqa: PTH108


class RemotePartialFile(PartialFile):
    """On any other: an upload in parts, which is there once it was completed, or a file that is renamed then.

    Args:
        fs: The fsspec file system.
        final: Where it will be.
        atomic: Whether an upload appears as a whole by itself.
    """

    def __init__(self, fs: Any, final: str, *, atomic: bool) -> None:
        super().__init__(final)
        self._fs = fs
        self._target = final if atomic else _unfinished(final)
        if not atomic:
            fs.makedirs(final.rpartition("/")[0], exist_ok=True)
        self._file = fs.open(self._target, "wb")

    def write(self, content: Sequence[bytes | memoryview], check: Check) -> None:
        """See `PartialFile.write`. What is written is copied, and uploaded when there is enough for a part."""
        for piece in content:
            check()
            self._file.write(bytes(piece))

    def finish(self) -> None:
        """See `PartialFile.finish`."""
        self._file.close()
        if self._target != self.final:
            self._fs.mv(self._target, self.final)

    def discard(self) -> None:
        """See `PartialFile.discard`."""
        if self._target == self.final:
            with contextlib.suppress(Exception):
                self._file.discard()
            with contextlib.suppress(Exception):
                self._file.closed = True  # its destructor would close it, and to close an upload is to complete it
        else:
            with contextlib.suppress(Exception):
                self._file.close()
            with contextlib.suppress(Exception):
                self._fs.rm(self._target)


def _unfinished(final: str) -> str:
    """A name nobody else uses: two processes may write the same file."""
    return f"{final}.{secrets.token_hex(4)}.part"
