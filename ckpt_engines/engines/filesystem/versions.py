"""Versions in a store directory: reading buckets, finding committed versions, which of them stay, removing the others.

`StoredVersion` reads a version that the engine has committed, outside of any session.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ...contract.bucket import Bucket
from ...errors import ProtocolError, StorageError
from ...waits import Deadline
from .bucket_files import UNFINISHED, byte_view
from .file_names import (
    COMMITTED,
    DOCUMENT,
    SENDER,
    SENDER_FILE,
    SESSION,
    VERSION,
    CommittedVersion,
    latest_name,
    parse_latest,
    parse_sender,
    payload_name,
)
from .process_identity import is_dead
from .store_directory import Guard, StoreDirectory, standalone_guard

_log = logging.getLogger(__name__)


def read_bucket(store: StoreDirectory, directory: str, bucket: Bucket, guard: Guard) -> bool:
    """Fill `bucket` from the version in `directory`. Returns False when the bucket's file is not there (yet).

    Raises `ProtocolError` when the file has another size than its buckets, or `StorageError`.
    """
    offset, total = (bucket.part.offset, bucket.part.total) if bucket.part else (0, bucket.nbytes)
    return store.read_payload(f"{directory}/{payload_name(bucket)}", byte_view(bucket.data), guard, offset, total)


def committed_versions(store: StoreDirectory, directory: str, guard: Guard) -> list[CommittedVersion]:
    """Return the committed versions of all senders whose place in the topology is that of `directory`, newest first.

    Raises `ProtocolError` if the list is malformed.
    """
    name = latest_name(directory)
    text = store.read_text(name, guard)
    return [] if text is None else parse_latest(text, store.full(name), guard.life.part)


def kept_and_dropped(
    store: StoreDirectory, newest: CommittedVersion, earlier: Sequence[CommittedVersion], most: int, guard: Guard
) -> tuple[list[CommittedVersion], list[CommittedVersion]]:
    """Return the versions that are kept once `newest` is committed, newest first, and those to remove.

    Of `newest` and the `earlier` ones, newest first, `most` are kept, and those of other senders that are alive on this host: a
    sender removes its own versions.
    """
    kept = [newest, *earlier[: most - 1]]
    dropped: list[CommittedVersion] = []
    for entry in earlier[most - 1 :]:
        foreign = entry.sender_directory != newest.sender_directory
        text = store.read_text(f"{entry.sender_directory}/{SENDER_FILE}", guard) if foreign else None
        in_use = text is not None and not is_dead(parse_sender(text)[0], elsewhere=True)
        (kept if in_use else dropped).append(entry)
    return kept, dropped


def remove_version(store: StoreDirectory, directory: str, guard: Guard) -> None:
    """Remove a version, and then its parent directories if they are empty."""
    store.remove(f"{directory}/{COMMITTED}", guard)  # first, so that no incomplete version has it
    store.remove_tree(directory, guard)
    _remove_empty(store, directory.rpartition("/")[0], guard)


def remove_sender(store: StoreDirectory, directory: str, guard: Guard) -> None:
    """Remove `SENDER_FILE` from a sender's directory, and then that directory and the session's if they are empty."""
    store.remove(f"{directory}/{SENDER_FILE}", guard)
    _remove_empty(store, directory, guard)


def remove_leftovers(store: StoreDirectory, own_session: str, guard: Guard) -> None:
    """Remove the files of dead senders, except for their committed versions.

    One run at a time writes to the store. So a sender of another session is dead if it ran on another host or in another
    container, where this process cannot look. The own session may have senders on several hosts.
    """
    for session in filter(SESSION.fullmatch, store.names("", guard)):
        for sender in filter(SENDER.fullmatch, store.names(session, guard)):
            directory = f"{session}/{sender}"
            try:
                text = store.read_text(f"{directory}/{SENDER_FILE}", guard)
                if text is not None and is_dead(parse_sender(text)[0], elsewhere=session != own_session):
                    _remove_leftovers_of(store, directory, guard)
            except (StorageError, ProtocolError) as error:  # another sender may be removing them
                _log.info("%s: the files of a dead sender were not removed: %s", guard.life.part, error)


def _remove_leftovers_of(store: StoreDirectory, directory: str, guard: Guard) -> None:
    committed = committed_versions(store, directory, guard)
    kept = {entry.directory for entry in committed}
    for name in store.names(directory, guard):
        path = f"{directory}/{name}"
        if VERSION.fullmatch(name):
            # If the list of committed versions is lost, versions with the mark stay.
            marked = not committed and store.read_text(f"{path}/{COMMITTED}", guard) is not None
            if path not in kept and not marked:
                store.remove(f"{path}/{COMMITTED}", guard)
                store.remove_tree(path, guard)
        elif name.endswith(UNFINISHED):  # and nothing that a NAS puts into every directory
            store.remove(path, guard)
    remove_sender(store, directory, guard)


def _remove_empty(store: StoreDirectory, sender_directory: str, guard: Guard) -> None:
    for directory in (sender_directory, sender_directory.partition("/")[0]):
        with contextlib.suppress(StorageError):
            store.remove_if_empty(directory, guard)


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
