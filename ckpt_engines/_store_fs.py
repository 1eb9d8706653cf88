"""A directory of files on a local or remote file system, with the few operations the filesystem engine needs."""

from __future__ import annotations

import contextlib
import ctypes
import io
import os
from collections.abc import Iterator
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem

from .errors import ConfigError, ProtocolError, StorageError

_PUT_IS_ATOMIC = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss"})
_PART = "filesystem engine"


class StoreDirectory:
    """The directory at an fsspec `url`. Paths are relative to it and use slashes.

    A file appears under its name only when it is complete: by a rename, or on object stores by the upload itself.

    Raises:
        ConfigError: The URL's file system is unknown or its package is not installed.
    """

    def __init__(self, url: str, *, fsync: bool) -> None:
        try:
            self._fs, self._root = fsspec.core.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError, TypeError) as error:
            raise ConfigError(
                f"path {url!r} cannot be used: {error}.",
                part=_PART,
                hint="pip install 'weightlane[fs]' has S3; other fsspec protocols need their own package.",
            ) from error
        self._fsync = fsync
        protocols = (self._fs.protocol,) if isinstance(self._fs.protocol, str) else self._fs.protocol
        self.is_local = isinstance(self._fs, LocalFileSystem)
        self._put_is_atomic = not _PUT_IS_ATOMIC.isdisjoint(protocols)

    def full(self, path: str) -> str:
        """Path as the file system knows it."""
        return f"{self._root.rstrip('/')}/{path}" if path else self._root

    def write(self, path: str, data: torch.Tensor) -> None:
        """Write contiguous CPU `data` (uint8) to a new file; `StorageError`, and no file, when that fails."""
        final = self.full(path)
        written = final if self._put_is_atomic else f"{final}.part"
        with self._typed("write", final):
            try:
                self._fs.makedirs(final.rpartition("/")[0], exist_ok=True)
                if self.is_local:
                    self._write_local(written, data)
                else:
                    with self._fs.open(written, "wb") as file:
                        file.write(byte_view(data))
                if written != final:
                    self._rename(written, final)
            except BaseException:
                with contextlib.suppress(OSError):
                    self._fs.rm(written)
                raise

    def _write_local(self, path: str, data: torch.Tensor) -> None:
        with open(path, "wb", buffering=0) as file:  # noqa: PTH123
            rest = byte_view(data)
            while rest:
                rest = rest[file.write(rest) :]
            if self._fsync:
                os.fsync(file.fileno())

    def _rename(self, source: str, target: str) -> None:
        if not self.is_local:
            self._fs.mv(source, target)
            return
        os.replace(source, target)  # noqa: PTH105
        if self._fsync:
            directory = os.open(os.path.dirname(target), os.O_RDONLY)  # noqa: PTH120
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def read_into(self, path: str, data: torch.Tensor) -> bool:
        """Fill contiguous CPU `data` (uint8) from a file; False when there is no such file yet.

        Raises `ProtocolError` when the file has another size, or `StorageError`.
        """
        final = self.full(path)
        with self._typed("read", final):
            try:
                file: Any = open(final, "rb", buffering=0) if self.is_local else self._fs.open(final, "rb")  # noqa: PTH123,SIM115
            except FileNotFoundError:
                return False
            with file:
                size = file.seek(0, io.SEEK_END)
                if size != data.numel():
                    raise ProtocolError(f"{final} has {size} bytes, expected {data.numel()}.", part=_PART)
                file.seek(0)
                rest = byte_view(data)
                while rest:
                    count = file.readinto(rest)
                    if not count:
                        raise ProtocolError(f"{final} was cut off while it was read.", part=_PART)
                    rest = rest[count:]
        return True

    def read_text(self, path: str) -> str | None:
        """A small file's text; None when there is no such file."""
        with self._typed("read", self.full(path)):
            try:
                return str(self._fs.cat_file(self.full(path)).decode(errors="replace"))
            except FileNotFoundError:
                return None

    def write_text(self, path: str, text: str) -> None:
        """Write a small file."""
        self.write(path, torch.tensor(list(text.encode()), dtype=torch.uint8))

    def names(self, path: str) -> list[str]:
        """Names of everything in a directory; empty when there is no such directory."""
        with self._typed("list", self.full(path)):
            try:
                return sorted(
                    entry.rstrip("/").rpartition("/")[2] for entry in self._fs.ls(self.full(path), detail=False)
                )
            except FileNotFoundError:
                return []

    def remove_tree(self, path: str) -> None:
        """Remove a directory and all in it; nothing happens when it does not exist."""
        with self._typed("remove", self.full(path)), contextlib.suppress(FileNotFoundError):
            self._fs.rm(self.full(path), recursive=True)

    def remove_if_empty(self, path: str) -> None:
        """Remove a directory unless somebody still uses it."""
        if not self.names(path):
            with contextlib.suppress(OSError):
                self._fs.rmdir(self.full(path))

    @contextlib.contextmanager
    def _typed(self, action: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, StorageError):
                raise
            reason = error.strerror or str(error)
            raise StorageError(
                f"cannot {action} {path}: {reason}.",
                part=_PART,
                hint="Free some space there, or set another checkpoint_engine.options.path.",
            ) from error


def byte_view(data: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor, without NumPy. Valid while `data` lives."""
    return (
        memoryview((ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())).cast("B")
        if data.numel()
        else memoryview(b"")
    )
