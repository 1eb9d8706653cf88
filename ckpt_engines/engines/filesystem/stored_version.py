"""`StoredVersion`: reads a version that the ``filesystem`` engine has committed, outside of any session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...contract.bucket import Bucket
from ...deadline import Deadline
from ...errors import ProtocolError, StorageError
from .file_names import DOCUMENT, CommittedVersion, payload_name
from .guard import standalone_guard
from .store_directory import StoreDirectory
from .versions import committed_versions, read_bucket

_PART = "stored version"
_FIRST_SENDER = "any-session/sender-0"


class StoredVersion:
    """A committed version in the directory or at the fsspec URL that is a ``filesystem`` engine's ``path``.

    The version stays readable while the engine keeps it (``keep_versions``).
    """

    def __init__(self, store: StoreDirectory, entry: CommittedVersion) -> None:
        self._store = store
        self._entry = entry

    @classmethod
    def newest(cls, path: str, storage_options: Mapping[str, Any] | None, deadline: Deadline) -> StoredVersion:
        """Return the newest committed version.

        Raises `StorageError` when nothing is committed there, `ProtocolError`, `ConfigError` or `DeadlineExceededError`.
        """
        store = StoreDirectory(path, storage_options)
        with standalone_guard(_PART, deadline) as guard:
            committed = committed_versions(store, _FIRST_SENDER, guard)
        if not committed:
            raise StorageError(
                f"no version has been committed at {path}.",
                part=_PART,
                hint="Give the path of the checkpoint engine's options, and wait until a version serves.",
            )
        return cls(store, committed[0])

    @property
    def version(self) -> int:
        """The version's number."""
        return self._entry.version

    @property
    def location(self) -> str:
        """The version's directory in its file system. No other publication uses the same one."""
        return self._store.full(self._entry.directory)

    def document(self, name: str, deadline: Deadline) -> str:
        """Text of one of the version's documents. Raises `StorageError` when it is missing."""
        if not DOCUMENT.fullmatch(name):
            raise ProtocolError(f"{name!r} is not the name of a document.", part=_PART)
        with standalone_guard(_PART, deadline) as guard:
            text = self._store.read_text(f"{self._entry.directory}/{name}", guard)
        if text is None:
            raise self._missing(name)
        return text

    def read(self, bucket: Bucket, deadline: Deadline) -> None:
        """Fill `bucket`. Raises `StorageError` when its file is missing, `ProtocolError` when the file has another size."""
        with standalone_guard(_PART, deadline) as guard:
            if not read_bucket(self._store, self._entry.directory, bucket, guard):
                raise self._missing(payload_name(bucket))

    def _missing(self, name: str) -> StorageError:
        return StorageError(
            f"{self.location}/{name} is missing.",
            part=_PART,
            hint="The version may have been removed meanwhile (checkpoint_engine.options.keep_versions).",
        )
