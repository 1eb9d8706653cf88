"""The filesystem engine: versions as files in a directory that all sides see, local, NFS or any fsspec URL.

Layout, where ``n`` is the sender's place in the topology::

    <path>/latest.json                                      the newest committed version, and those that are kept beside it
    <path>/<session>/sender-<n>/sender.json                 which process writes here; there while the session lasts
    <path>/<session>/sender-<n>/v<version>/
        bucket-00000.safetensors                            one bucket, or several from it on; there when complete
        manifest.json, model.safetensors.index.json         whatever documents the framework hands over, before or at the commit
        COMMITTED                                           there once the version has served

A version stays until newer ones have been *committed*: beginning the next one removes nothing, so that receivers may still
read. Then the newest `keep_versions` committed ones stay, after `close` and over sessions, and everything older goes, also
what never was committed. Closing removes what is not committed; what a killed sender leaves of that is removed by the next
one on the same host.

Everybody finds files by their names. Listings, which network file systems may serve from a cache, only help to find
leftovers. An NFS client also remembers for a while (``acdirmax``, a minute by default) that a file was *not* there;
receivers make it forget by opening the directories anew. Where that is not enough, mount with ``lookupcache=positive``.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from pydantic import Field

from ...channels.channel import Address, Channel
from ...contract.bucket import Bucket, FilePart
from ...contract.capabilities import Capabilities, Delivery
from ...contract.engine import API_VERSION, CheckpointEngine, EngineConfig, Topology, WeightReceiver, WeightSender
from ...contract.storing import StoringSender, VersionFiles
from ...deadline import Deadline
from ...errors import DeadlineExceededError, PeerLostError, ProtocolError, StorageError, WeightlaneError
from ...runtime.lifecycle import Lifecycle
from ...toolkit.paired import PostedCalls
from .file_names import (
    COMMITTED,
    DOCUMENT,
    SENDER_FILE,
    CommittedVersion,
    checked_session,
    latest_name,
    latest_text,
    parse_sender,
    payload_name,
    sender_directory,
    sender_text,
    version_directory,
)
from .partial_file import PartialFile
from .process_identity import is_dead, process_identity
from .store_directory import Guard, StoreDirectory, byte_view, standalone_guard
from .versions import (
    committed_versions,
    is_in_use,
    read_bucket,
    remove_leftovers,
    remove_sender,
    remove_version,
)

_log = logging.getLogger(__name__)
_FIRST_POLL_S = {True: 0.005, False: 0.1}
"""By whether the file system is local: a look at an object store is a paid request."""
_SLOWEST_POLL_FACTOR = 10
_HEALTH_CHECK_S = {True: 0.5, False: 2.0}
_CLEANUP_S = 5.0
"""Longest time that closing spends on removing files."""


class FilesystemConfig(EngineConfig):
    """Options of ``filesystem``."""

    path: str = Field(
        min_length=1,
        description="Directory, or fsspec URL such as 's3://bucket/prefix', that the sender and all receivers see."
        " One run at a time may write to it.",
    )
    keep_versions: int = Field(
        2, ge=1, description="How many of the newest committed versions stay, also when the run has ended."
    )
    poll_s: float | None = Field(
        None,
        gt=0,
        le=5,
        description="Seconds between two looks for a new file, growing tenfold while waiting;"
        " 0.005 for local paths and 0.1 for URLs unless set.",
    )
    fsync: bool = Field(False, description="Flush every file to the disk before receivers see it (local paths only).")
    storage_options: dict[str, Any] = Field(
        default_factory=dict,
        description="What fsspec hands to the file system, e.g. {endpoint_url = 'http://host:9000'} for S3. No secrets:"
        " options are written to logs and run directories. Credentials belong in the environment (AWS_ACCESS_KEY_ID, ...) or in"
        " the store's own configuration files, on every host.",
    )


@dataclass(slots=True)
class _Growing:
    """A file of several buckets."""

    file: PartialFile
    version: int
    begun_with: FilePart
    size: int
    """Bytes of the buckets that are in it."""

    def continues_with(self, bucket: Bucket, part: FilePart) -> bool:
        expected = replace(self.begun_with, offset=self.size)
        return (bucket.version, part) == (self.version, expected) and self.size + bucket.nbytes <= part.total


class FilesystemSender(StoringSender):
    """Writes buckets; knows nothing of who reads them."""

    def __init__(self, name: str, config: FilesystemConfig) -> None:
        self._name = name
        self._life = Lifecycle(f"filesystem sender {name}", self._release)
        self._config = config
        self._store = StoreDirectory(config.path, config.storage_options, fsync=config.fsync)
        self._directory = ""
        self._files: dict[int, VersionFiles] = {}
        """By version, of those that were opened."""
        self._written: dict[int, set[int]] = {}
        """Indices of the buckets that are there, by version."""
        self._committed: set[int] = set()
        """Versions of this sender that stay when it closes."""
        self._committing = -1
        """The version of which the list of committed ones may speak, whether or not that was acknowledged."""
        self._doomed: list[str] = []
        """Directories of other sessions that are no longer kept and could not be removed yet."""
        self._growing: _Growing | None = None
        """The file of several buckets that lacks some."""
        self._posted = PostedCalls()

    def address(self) -> Address:
        """Which process this is, so that receivers on the same host notice its death."""
        return process_identity()

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Make the sender's directory, after removing what dead senders of this host left."""
        with self._life.call():
            guard = Guard(self._life, deadline)
            directory = sender_directory(topology, self._name, self._life.part)
            guard.check("the file system")
            remove_leftovers(self._store, guard)
            self._directory = directory
            self._store.write_text(f"{directory}/{SENDER_FILE}", sender_text(self.address(), 0), guard)

    def open_version(self, files: VersionFiles, deadline: Deadline) -> None:
        """Write the version's documents; its buckets get their prefixes from now on."""
        with self._life.call():
            guard = self._guard(deadline)
            self._check_names(files.documents)
            self._files[files.version] = files
            self._written[files.version] = set()
            self._write_documents(files.version, files.documents, guard)

    def _check_names(self, documents: Mapping[str, str]) -> None:
        for name in documents:
            if not DOCUMENT.fullmatch(name):
                raise ProtocolError(f"{name!r} is not the name of a document.", part=self._life.part)

    def _write_documents(self, version: int, documents: Mapping[str, str], guard: Guard) -> None:
        for name, text in documents.items():
            self._store.write_text(f"{version_directory(self._directory, version)}/{name}", text, guard)

    def post(self, bucket: Bucket, receivers: Sequence[str]) -> None:  # noqa: ARG002
        """Write the bucket's file when it is waited for."""
        with self._life.call():
            self._posted.post(lambda deadline: self._write(bucket, self._guard(deadline)))

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Write what was posted. What is there of older versions stays."""
        with self._life.call():
            self._posted.flush(deadline, pending)

    def _write(self, bucket: Bucket, guard: Guard) -> None:
        prefix = b""
        if files := self._files.get(bucket.version):
            if bucket.index >= len(files.prefixes):
                message = f"bucket {bucket.index} of version {bucket.version} was not announced."
                raise ProtocolError(message, part=self._life.part)
            prefix = files.prefixes[bucket.index]
        written = self._written.setdefault(bucket.version, set())
        directory = version_directory(self._directory, bucket.version)
        content: list[bytes | memoryview] = [prefix, byte_view(bucket.data)]
        if bucket.part is None:
            self._discard_growing(guard.deadline)
            self._store.write(f"{directory}/{payload_name(bucket)}", content, guard)
            written.add(bucket.index)
        elif self._grow(directory, bucket, bucket.part, content, guard):
            written.update(range(bucket.part.first, bucket.index + 1))

    def _grow(
        self, directory: str, bucket: Bucket, part: FilePart, content: Sequence[bytes | memoryview], guard: Guard
    ) -> bool:
        """Write a bucket to the file that it is a part of; returns whether that is complete now."""
        if part.offset == 0:
            self._discard_growing(guard.deadline)
            file = self._store.begin(f"{directory}/{payload_name(bucket)}", guard)
            self._growing = _Growing(file, bucket.version, part, 0)
        growing = self._growing
        if growing is None or not growing.continues_with(bucket, part):
            message = f"bucket {bucket.index} of version {bucket.version} continues a file that does not end there."
            hint = "The buckets of a file are sent in their order, with no other between them, each once."
            raise ProtocolError(message, part=self._life.part, hint=hint)
        try:
            self._store.append(growing.file, content, guard)
            growing.size += bucket.nbytes
            complete = growing.size == part.total
            if complete:
                self._store.finish(growing.file, guard)
                self._growing = None
        except BaseException:
            self._discard_growing(guard.deadline)
            raise
        return complete

    def _discard_growing(self, deadline: Deadline) -> None:
        """Of a version that was given up."""
        growing, self._growing = self._growing, None
        if growing is not None:
            self._store.discard(growing.file, self._life.part, deadline)

    def commit_version(self, version: int, documents: Mapping[str, str], deadline: Deadline) -> None:
        """Write `documents`, make `version` the newest one that readers find, then remove those that are no longer kept.

        `ProtocolError` when a bucket of it is missing. A file that cannot be removed is logged: the version counts.
        """
        with self._life.call():
            guard = self._guard(deadline)
            self._check_names(documents)
            files = self._files.get(version)
            missing = set(range(len(files.prefixes))) if files else set()
            missing -= self._written.get(version, set())
            if version not in self._written or missing:
                what = f"bucket {min(missing)} of it is" if missing else "its buckets are"
                message = f"version {version} cannot be committed: {what} missing."
                raise ProtocolError(message, part=self._life.part)
            self._write_documents(version, documents, guard)
            entry = CommittedVersion(version=version, directory=version_directory(self._directory, version))
            kept, dropped = self._retained(entry, guard)
            self._committing = version
            self._store.write_text(latest_name(self._directory), latest_text(kept), guard)
            self._committed = {other.version for other in kept if other.sender_directory == self._directory}
            self._store.write_text(f"{entry.directory}/{COMMITTED}", f'{{"version": {version}}}\n', guard)
            self._doomed += [other.directory for other in dropped if other.sender_directory != self._directory]
            self._remove_superseded(version, guard)

    def _retained(
        self, newest: CommittedVersion, guard: Guard
    ) -> tuple[list[CommittedVersion], list[CommittedVersion]]:
        """Which versions stay now that `newest` is committed, newest first, and which go."""
        earlier = [entry for entry in self._listed(guard) if entry != newest]
        stay = self._config.keep_versions - 1
        kept = [newest, *earlier[:stay]]
        dropped: list[CommittedVersion] = []
        for entry in earlier[stay:]:  # those of a sender that may still be at work are its own business
            foreign = entry.sender_directory != self._directory
            (kept if foreign and is_in_use(self._store, entry.sender_directory, guard) else dropped).append(entry)
        return kept, dropped

    def _listed(self, guard: Guard) -> list[CommittedVersion]:
        try:
            return committed_versions(self._store, self._directory, guard)
        except ProtocolError as error:
            _log.warning("%s: earlier versions are forgotten: %s", self._life.part, error)
            return []

    def _remove_superseded(self, newest: int, guard: Guard) -> None:
        mine = [version for version in self._written if version < newest and version not in self._committed]
        try:
            if mine:  # receivers learn of it before it happens
                oldest = min(version for version in self._written if version not in mine)
                text = sender_text(self.address(), oldest)
                self._store.write_text(f"{self._directory}/{SENDER_FILE}", text, guard)
            for version in mine:
                remove_version(self._store, version_directory(self._directory, version), guard)
                del self._written[version]
                self._files.pop(version, None)
            while self._doomed:
                remove_version(self._store, self._doomed[-1], guard)
                self._doomed.pop()
        except (StorageError, DeadlineExceededError) as error:  # tried again after the next commit
            _log.warning("%s: old versions were not removed: %s", self._life.part, error)

    def _guard(self, deadline: Deadline) -> Guard:
        if not self._directory:
            raise ProtocolError("not connected.", part=self._life.part)
        guard = Guard(self._life, deadline)
        guard.check("the file system")
        return guard

    def close(self) -> None:
        """See `WeightSender.close`. Committed versions stay."""
        self._life.close()

    def _release(self) -> None:
        deadline = Deadline.after(_CLEANUP_S)
        self._discard_growing(deadline)
        if not self._directory:
            return
        with standalone_guard(self._life.part, deadline) as guard:
            for version in self._written:
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


class FilesystemReceiver(WeightReceiver):
    """Waits for files and reads them."""

    def __init__(self, name: str, config: FilesystemConfig) -> None:
        self._life = Lifecycle(f"filesystem receiver {name}", lambda: None)
        self._store = StoreDirectory(config.path, config.storage_options)
        self._first_poll_s = config.poll_s or _FIRST_POLL_S[self._store.is_local]
        self._slowest_poll_s = _SLOWEST_POLL_FACTOR * self._first_poll_s
        self._health_check_s = _HEALTH_CHECK_S[self._store.is_local]
        self._directories: dict[str, str] = {}
        self._senders: dict[str, Address] = {}
        self._posted = PostedCalls()

    def address(self) -> Address:
        """Empty: the sender does not contact receivers."""
        return {}

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Wait until every sender has made its directory. Possible at any time while the session lasts."""
        with self._life.call():
            checked_session(topology, self._life.part)
            for sender, address in topology.senders.items():
                guard = Guard(self._life, deadline, sender)
                directory = sender_directory(topology, sender, self._life.part)
                self._senders[sender] = address
                while self._store.read_text(f"{directory}/{SENDER_FILE}", guard) is None:
                    self._check_alive(sender)
                    self._store.look_again(directory)
                    guard.sleep(self._slowest_poll_s)
                    guard.check(self._store.full(directory))
                self._directories[sender] = directory

    def post(self, bucket: Bucket, sender: str) -> None:
        """Read the bucket's file when it is waited for."""
        with self._life.call():
            if sender not in self._directories:
                raise ProtocolError(f"not connected to {sender}.", part=self._life.part)
            self._posted.post(lambda deadline: self._read(bucket, sender, Guard(self._life, deadline, sender)))

    def flush(self, deadline: Deadline, pending: int = 0) -> None:
        """Wait for the files of what was posted and read them straight into the buckets."""
        with self._life.call():
            self._posted.flush(deadline, pending)

    def _read(self, bucket: Bucket, sender: str, guard: Guard) -> None:
        directory = version_directory(self._directories[sender], bucket.version)
        poll_s = self._first_poll_s
        next_check = Deadline.after(self._health_check_s)
        while not read_bucket(self._store, directory, bucket, guard):
            if next_check.expired:
                self._store.look_again(directory)
                self._check_health(sender, bucket, guard)
                next_check = Deadline.after(self._health_check_s)
            guard.sleep(poll_s)
            guard.check(self._store.full(f"{directory}/{payload_name(bucket)}"))
            poll_s = min(2 * poll_s, self._slowest_poll_s)

    def _check_alive(self, sender: str) -> None:
        if is_dead(self._senders[sender]):
            raise PeerLostError("the sender's process is gone.", part=self._life.part, peer=sender)

    def _check_health(self, sender: str, bucket: Bucket, guard: Guard) -> None:
        self._check_alive(sender)
        text = self._store.read_text(f"{self._directories[sender]}/{SENDER_FILE}", guard)
        if text is None:
            raise PeerLostError("the sender has closed.", part=self._life.part, peer=sender)
        if bucket.version < (oldest := parse_sender(text)[1]):
            raise StorageError(
                f"version {bucket.version} is no longer there, the oldest one is {oldest}.",
                part=self._life.part,
                peer=sender,
                hint="Raise checkpoint_engine.options.keep_versions.",
            )

    def close(self) -> None:
        """See `WeightReceiver.close`."""
        self._life.close()


class FilesystemEngine(CheckpointEngine):
    """CPU memory through files."""

    api_version = API_VERSION
    config_type = FilesystemConfig
    capabilities = Capabilities(
        devices=frozenset({"cpu"}), delivery=frozenset({Delivery.STORE}), persistent=True, elastic=True, channels=False
    )

    def check(self, deadline: Deadline) -> None:
        """See `CheckpointEngine.check`: a small file is written there, and removed."""
        config = cast("FilesystemConfig", self.config)
        store = StoreDirectory(config.path, config.storage_options)
        name = f"probe-{secrets.token_hex(4)}"
        with standalone_guard("filesystem engine", deadline) as guard:
            there = store.names("", guard)
            store.write_text(name, "", guard)
            store.remove(name, guard)
            if not there:
                store.remove_if_empty("", guard)

    def make_sender(self, name: str, device: torch.device) -> WeightSender:  # noqa: ARG002
        """See `CheckpointEngine.make_sender`."""
        return FilesystemSender(name, cast("FilesystemConfig", self.config))

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:  # noqa: ARG002
        """See `CheckpointEngine.make_receiver`."""
        return FilesystemReceiver(name, cast("FilesystemConfig", self.config))
