"""The filesystem engine: buckets as files in a directory that all sides see, local, NFS or any fsspec URL.

Layout, where ``n`` is the sender's place in the topology::

    <path>/<session>/sender-<n>/sender.json                     which process writes here
    <path>/<session>/sender-<n>/v<version>/bucket-<index>.bin   one bucket, complete as soon as it has its name

A sender keeps the newest versions only and removes everything when it closes; what a killed sender leaves behind is
removed by the next one on the same host.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from ._lifecycle import Lifecycle
from ._store_fs import StoreDirectory
from .contract import (
    API_VERSION,
    Address,
    Bucket,
    Capabilities,
    CheckpointEngine,
    Delivery,
    EngineConfig,
    Mailbox,
    Topology,
    WeightReceiver,
    WeightSender,
)
from .deadline import Deadline
from .errors import PeerLostError, ProtocolError, StorageError, WeightlaneError

_SESSION = re.compile(r"[a-z0-9][a-z0-9-]{0,99}")
_VERSION_DIR = re.compile(r"v(\d+)")
_SLOWEST_POLL_S = 0.05
_HEALTH_CHECK_S = 0.5


class FilesystemConfig(EngineConfig):
    """Options of ``filesystem``."""

    path: str = Field(
        min_length=1,
        description="Directory, or fsspec URL such as 's3://bucket/prefix', that the sender and all receivers see.",
    )
    keep_versions: int = Field(1, ge=1, description="How many of the newest versions stay on the file system.")
    poll_s: float = Field(
        0.005,
        gt=0,
        le=_SLOWEST_POLL_S,
        description="Seconds between two looks for a new file; grows to 0.05 while waiting.",
    )
    fsync: bool = Field(False, description="Flush every file to the disk before receivers see it (local paths only).")


class FilesystemSender(WeightSender):
    """Writes buckets; knows nothing of who reads them."""

    def __init__(self, name: str, config: FilesystemConfig) -> None:
        self._name = name
        self._life = Lifecycle(f"filesystem sender {name}", self._release)
        self._config = config
        self._store = StoreDirectory(config.path, fsync=config.fsync)
        self._session = ""
        self._directory = ""
        self._newest: int | None = None

    def address(self) -> Address:
        """Which process this is, so that receivers on the same host notice its death."""
        return _process_identity(os.getpid())

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:  # noqa: ARG002
        """Make the sender's directory, after removing those of dead senders of this host."""
        with self._life.call():
            self._session = _checked_session(topology, self._life.part)
            if self._store.is_local:
                self._remove_stale_sessions()
            self._directory = _sender_directory(topology, self._name, self._life.part)
            deadline.check("the file system", part=self._life.part)
            self._store.write_text(f"{self._directory}/sender.json", json.dumps(dict(self.address())))

    def send(self, bucket: Bucket, receivers: Sequence[str], deadline: Deadline) -> None:  # noqa: ARG002
        """Write the bucket's file. A newer version's first bucket removes versions that are no longer kept."""
        with self._life.call():
            if not self._directory:
                raise ProtocolError("not connected.", part=self._life.part)
            deadline.check("the file system", part=self._life.part)
            if bucket.version != self._newest:
                self._newest = bucket.version
                self._remove_old_versions(bucket.version)
            self._store.write(_bucket_path(self._directory, bucket), bucket.data)

    def _remove_old_versions(self, newest: int) -> None:
        matches = (_VERSION_DIR.fullmatch(name) for name in self._store.names(self._directory))
        older = sorted(int(match[1]) for match in matches if match and int(match[1]) < newest)
        for version in older[: max(0, len(older) + 1 - self._config.keep_versions)]:
            self._store.remove_tree(f"{self._directory}/v{version}")

    def _remove_stale_sessions(self) -> None:
        for session in filter(_SESSION.fullmatch, self._store.names("")):
            for sender in self._store.names(session):
                directory = f"{session}/{sender}"
                text = self._store.read_text(f"{directory}/sender.json") if sender.startswith("sender-") else None
                if text is not None and _is_dead(text):
                    with contextlib.suppress(StorageError):  # somebody else may be removing it
                        self._store.remove_tree(directory)
                        self._store.remove_if_empty(session)

    def close(self) -> None:
        """See `WeightSender.close`."""
        self._life.close()

    def _release(self) -> None:
        if self._directory:
            self._store.remove_tree(self._directory)
            self._store.remove_if_empty(self._session)


class FilesystemReceiver(WeightReceiver):
    """Waits for files and reads them."""

    def __init__(self, name: str, config: FilesystemConfig) -> None:
        self._life = Lifecycle(f"filesystem receiver {name}", lambda: None)
        self._config = config
        self._store = StoreDirectory(config.path, fsync=False)
        self._directories: dict[str, str] = {}
        self._senders: dict[str, Address] = {}

    def address(self) -> Address:
        """Empty: the sender does not contact receivers."""
        return {}

    def connect(self, topology: Topology, mailbox: Mailbox, deadline: Deadline) -> None:  # noqa: ARG002
        """Wait until every sender has made its directory."""
        with self._life.call():
            _checked_session(topology, self._life.part)
            for sender, address in topology.senders.items():
                directory = _sender_directory(topology, sender, self._life.part)
                self._senders[sender] = address
                while self._store.read_text(f"{directory}/sender.json") is None:
                    self._check_alive(sender)
                    self._life.wait({}, min(_SLOWEST_POLL_S, deadline.remaining_s))
                    deadline.check(f"{self._store.full(directory)}", part=self._life.part, peer=sender)
                self._directories[sender] = directory

    def receive(self, bucket: Bucket, sender: str, deadline: Deadline) -> None:
        """Wait for the bucket's file and read it straight into the bucket."""
        with self._life.call():
            if sender not in self._directories:
                raise ProtocolError(f"not connected to {sender}.", part=self._life.part)
            path = _bucket_path(self._directories[sender], bucket)
            poll_s = self._config.poll_s
            next_check = Deadline.after(_HEALTH_CHECK_S)
            while not self._store.read_into(path, bucket.data):
                if next_check.expired:
                    self._check_alive(sender)
                    self._check_not_superseded(sender, bucket)
                    next_check = Deadline.after(_HEALTH_CHECK_S)
                self._life.wait({}, min(poll_s, deadline.remaining_s))
                deadline.check(f"{self._store.full(path)}", part=self._life.part, peer=sender)
                poll_s = min(2 * poll_s, _SLOWEST_POLL_S)

    def _check_alive(self, sender: str) -> None:
        if _is_dead(json.dumps(dict(self._senders[sender]))):
            raise PeerLostError("the sender's process is gone.", part=self._life.part, peer=sender)

    def _check_not_superseded(self, sender: str, bucket: Bucket) -> None:
        names = self._store.names(self._directories[sender])
        if not names:
            raise PeerLostError("the sender has closed.", part=self._life.part, peer=sender)
        newer = [name for name in names if (match := _VERSION_DIR.fullmatch(name)) and int(match[1]) > bucket.version]
        if newer and f"v{bucket.version}" not in names:
            raise StorageError(
                f"version {bucket.version} is no longer there, the sender is at {newer[-1]} already.",
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
    capabilities = Capabilities(devices=frozenset({"cpu"}), delivery=frozenset({Delivery.STORE}))

    def make_sender(self, name: str) -> WeightSender:
        """See `CheckpointEngine.make_sender`."""
        return FilesystemSender(name, cast("FilesystemConfig", self.config))

    def make_receiver(self, name: str) -> WeightReceiver:
        """See `CheckpointEngine.make_receiver`."""
        return FilesystemReceiver(name, cast("FilesystemConfig", self.config))


def _checked_session(topology: Topology, part: str) -> str:
    """The session's name, which comes from a peer and becomes a directory."""
    if not _SESSION.fullmatch(topology.session):
        raise ProtocolError(f"{topology.session!r} is not a session name.", part=part)
    return topology.session


def _sender_directory(topology: Topology, sender: str, part: str) -> str:
    """Relative directory of a sender. Its name may hold anything, so its place in the topology is used."""
    try:
        place = list(topology.senders).index(sender)
    except ValueError:
        raise ProtocolError(f"{sender!r} is not a sender of the topology.", part=part) from None
    return f"{_checked_session(topology, part)}/sender-{place}"


def _bucket_path(directory: str, bucket: Bucket) -> str:
    return f"{directory}/v{int(bucket.version)}/bucket-{int(bucket.index)}.bin"


def _process_identity(pid: int) -> dict[str, Any]:
    """A process so described that another one of the same host can tell whether it still lives."""
    return {"host": socket.gethostname(), "pid_namespace": _pid_namespace(), "pid": pid, "started": _start_time(pid)}


def _pid_namespace() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """When a process started, in clock ticks since boot; empty when it does not exist or the platform cannot tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in {"Z", "X"} else fields[19]


def _is_dead(identity: str) -> bool:
    """Whether `identity` (JSON of `_process_identity`) is of this host and its process is gone."""
    try:
        known = json.loads(identity)
        if (known["host"], known["pid_namespace"]) != (socket.gethostname(), _pid_namespace()) or not known["started"]:
            return False
        return _start_time(int(known["pid"])) != str(known["started"])
    except (ValueError, KeyError, TypeError, WeightlaneError):
        return False
