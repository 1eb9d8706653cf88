"""`FilesystemSender`: writes buckets and documents, commits versions, and removes versions that are no longer kept."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...channels.channel import Address, Channel
from ...contract.bucket import Bucket, FilePart
from ...contract.engine import Topology
from ...contract.storing import StoringSender, VersionFiles
from ...errors import DeadlineExceededError, ProtocolError, StorageError, WeightlaneError
from ...toolkit.halves import PostingHalf
from ...waits import Deadline
from .bucket_files import PartialFile, byte_view
from .config import FilesystemConfig
from .file_names import (
    COMMITTED,
    DOCUMENT,
    SENDER_FILE,
    CommittedVersion,
    latest_name,
    latest_text,
    payload_name,
    sender_directory,
    sender_text,
    version_directory,
)
from .process_identity import process_identity
from .store_directory import Guard, StoreDirectory, standalone_guard
from .versions import committed_versions, kept_and_dropped, remove_leftovers, remove_sender, remove_version

_log = logging.getLogger(__name__)
_CLEANUP_S = 5.0
"""How long closing may spend on removing files."""


@dataclass(slots=True)
class _Version:
    """A version that this sender writes or has written."""

    prefixes: Sequence[bytes] | None
    """Bytes ahead of each bucket; None for a version that was not opened, whose buckets have none."""
    written: set[int] = field(default_factory=set)
    """Indices of the buckets whose files are complete."""


@dataclass(slots=True)
class _PartialPayload:
    """A file of several buckets, some of which are not written yet."""

    file: PartialFile
    version: int
    first_part: FilePart
    nbytes: int = 0
    """Bytes of the buckets that are written."""

    def continues_with(self, bucket: Bucket, part: FilePart) -> bool:
        expected = replace(self.first_part, offset=self.nbytes)
        return (bucket.version, part) == (self.version, expected) and self.nbytes + bucket.nbytes <= part.total


class FilesystemSender(PostingHalf, StoringSender):
    """Writes files, and knows nothing of the receivers that read them."""

    def __init__(self, name: str, config: FilesystemConfig) -> None:
        super().__init__(f"filesystem sender {name}")
        self._name = name
        self._config = config
        self._store = StoreDirectory(config.path, config.storage_options, fsync=config.fsync)
        self._directory = ""
        self._versions: dict[int, _Version] = {}
        """Versions that this sender has not removed, by number."""
        self._committed: set[int] = set()
        """Versions of this sender that stay when it closes."""
        self._committing = -1
        """Version of the last write of the list of committed versions. The list may name it even if that write failed."""
        self._to_remove: list[str] = []
        """Version directories of other sessions that are no longer kept and could not be removed yet."""
        self._partial: _PartialPayload | None = None

    def address(self) -> Address:
        """Identity of this process, so that receivers on the same host notice its death."""
        return process_identity()

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Make the sender's directory, after removing what earlier senders have left."""
        with self._life.call():
            guard = Guard(self._life, deadline)
            directory = sender_directory(topology, self._name, self._life.part)
            remove_leftovers(self._store, topology.session, guard)
            self._directory = directory
            self._store.write_text(f"{directory}/{SENDER_FILE}", sender_text(self.address(), 0), guard)

    def open_version(self, files: VersionFiles, deadline: Deadline) -> None:
        """Write the version's documents, and keep the prefixes for its buckets."""
        with self._life.call():
            guard = self._guard(deadline)
            self._check_names(files.documents)
            self._versions[files.version] = _Version(files.prefixes)
            self._write_documents(files.version, files.documents, guard)

    def _check_names(self, documents: Mapping[str, str]) -> None:
        for name in documents:
            if not DOCUMENT.fullmatch(name):
                raise ProtocolError(f"{name!r} is not the name of a document.", part=self._life.part)

    def _write_documents(self, version: int, documents: Mapping[str, str], guard: Guard) -> None:
        for name, text in documents.items():
            self._store.write_text(f"{version_directory(self._directory, version)}/{name}", text, guard)

    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:  # noqa: ARG002
        """Note the bucket; `flush` writes its file."""
        with self._life.call():
            self._posted.append(lambda deadline: self._write(bucket, self._guard(deadline)))

    def _write(self, bucket: Bucket, guard: Guard) -> None:
        version = self._versions.setdefault(bucket.version, _Version(None))
        prefix = b""
        if version.prefixes is not None:
            if bucket.index >= len(version.prefixes):
                message = f"{bucket} was not announced."
                raise ProtocolError(message, part=self._life.part)
            prefix = version.prefixes[bucket.index]
        path = f"{version_directory(self._directory, bucket.version)}/{payload_name(bucket)}"
        content: list[bytes | memoryview] = [prefix, byte_view(bucket.data)]
        if bucket.part is None:
            self._discard_partial(guard.deadline)
            self._store.write(path, content, guard)
            version.written.add(bucket.index)
        elif self._append(path, bucket, bucket.part, content, guard):
            version.written.update(range(bucket.part.first, bucket.index + 1))

    def _append(
        self, path: str, bucket: Bucket, part: FilePart, content: Sequence[bytes | memoryview], guard: Guard
    ) -> bool:
        """Append a bucket to its file, which has several buckets. Returns whether the file is now complete."""
        if part.offset == 0:
            self._discard_partial(guard.deadline)
            self._partial = _PartialPayload(self._store.begin(path, guard), bucket.version, part)
        partial = self._partial
        if partial is None or not partial.continues_with(bucket, part):
            message = f"{bucket} continues a file that does not end there."
            hint = "The buckets of a file are sent in their order, with no other between them, each once."
            raise ProtocolError(message, part=self._life.part, hint=hint)
        try:
            self._store.append(partial.file, content, guard)
            partial.nbytes += bucket.nbytes
            complete = partial.nbytes == part.total
            if complete:
                self._store.finish(partial.file, guard)
                self._partial = None
        except BaseException:
            self._discard_partial(guard.deadline)
            raise
        return complete

    def _discard_partial(self, deadline: Deadline) -> None:
        """Remove the unfinished file of a version that was given up."""
        partial, self._partial = self._partial, None
        if partial is not None:
            self._store.discard(partial.file, self._life.part, deadline)

    def commit_version(self, version: int, documents: Mapping[str, str], deadline: Deadline) -> None:
        """Write `documents`, make `version` the newest one that readers find, then remove versions that are no longer kept.

        Raises `ProtocolError` when a bucket of the version is missing. A file that cannot be removed is logged, and the version
        is committed.
        """
        with self._life.call():
            guard = self._guard(deadline)
            self._check_names(documents)
            written = self._versions.get(version)
            missing = set(range(len(written.prefixes or ()))) - written.written if written else set()
            if written is None or missing:
                what = f"bucket {min(missing)} of it is" if missing else "its buckets are"
                message = f"version {version} cannot be committed: {what} missing."
                raise ProtocolError(message, part=self._life.part)
            self._write_documents(version, documents, guard)
            entry = CommittedVersion(version=version, directory=version_directory(self._directory, version))
            earlier = [each for each in self._listed(guard) if each != entry]
            kept, dropped = kept_and_dropped(self._store, entry, earlier, self._config.keep_versions, guard)
            self._committing = version
            self._store.write_text(latest_name(self._directory), latest_text(kept), guard)
            self._committed = {other.version for other in kept if other.sender_directory == self._directory}
            self._store.write_text(f"{entry.directory}/{COMMITTED}", f'{{"version": {version}}}\n', guard)
            self._to_remove += [other.directory for other in dropped if other.sender_directory != self._directory]
            self._remove_superseded(version, guard)

    def _listed(self, guard: Guard) -> list[CommittedVersion]:
        try:
            return committed_versions(self._store, self._directory, guard)
        except ProtocolError as error:
            _log.warning("%s: earlier versions are forgotten: %s", self._life.part, error)
            return []

    def _remove_superseded(self, newest: int, guard: Guard) -> None:
        mine = [version for version in self._versions if version < newest and version not in self._committed]
        try:
            if mine:  # receivers must learn of it before the files go
                oldest = min(version for version in self._versions if version not in mine)
                text = sender_text(self.address(), oldest)
                self._store.write_text(f"{self._directory}/{SENDER_FILE}", text, guard)
            for version in mine:
                remove_version(self._store, version_directory(self._directory, version), guard)
                del self._versions[version]
            while self._to_remove:
                remove_version(self._store, self._to_remove[-1], guard)
                self._to_remove.pop()
        except (StorageError, DeadlineExceededError) as error:  # tried again after the next commit
            _log.warning("%s: old versions were not removed: %s", self._life.part, error)

    def _guard(self, deadline: Deadline) -> Guard:
        if not self._directory:
            raise ProtocolError("not connected.", part=self._life.part)
        guard = Guard(self._life, deadline)
        guard.check("the file system")
        return guard

    def _release(self) -> None:
        """Remove the versions that are not committed."""
        deadline = Deadline.after(_CLEANUP_S)
        self._discard_partial(deadline)
        if not self._directory:
            return
        with standalone_guard(self._life.part, deadline) as guard:
            for version in self._versions:
                if version not in self._committed and not (
                    version == self._committing and self._is_listed(version, guard)
                ):
                    with contextlib.suppress(WeightlaneError):
                        self._store.remove_tree(version_directory(self._directory, version), guard)
            remove_sender(self._store, self._directory, guard)

    def _is_listed(self, version: int, guard: Guard) -> bool:
        """Whether readers may find `version` although its commit failed, for example by its deadline."""
        if self._store.in_doubt(latest_name(self._directory)):
            return True
        try:
            listed = committed_versions(self._store, self._directory, guard)
        except WeightlaneError:
            return True
        return version_directory(self._directory, version) in {entry.directory for entry in listed}
