"""`FilesystemReceiver`: waits for the sender's files and reads them."""

from __future__ import annotations

from collections.abc import Mapping

from ...channels.channel import Address, Channel
from ...contract.bucket import Bucket
from ...contract.engine import Topology, WeightReceiver
from ...errors import PeerLostError, ProtocolError, StorageError
from ...toolkit.halves import PostingHalf
from ...waits import Deadline
from .config import FilesystemConfig
from .file_names import SENDER_FILE, parse_sender, payload_name, sender_directory, version_directory
from .process_identity import is_dead
from .store_directory import Guard, StoreDirectory
from .versions import read_bucket

_FIRST_POLL_S = {True: 0.005, False: 0.1}
"""First pause between two checks for a file, by whether the store is local: each check of an object store is a paid request."""
_SLOWEST_POLL_FACTOR = 10
"""Ratio of the longest pause to the first one."""
_HEALTH_CHECK_S = {True: 0.5, False: 2.0}
"""Pause between two checks that the sender is alive, by whether the store is local."""


class FilesystemReceiver(PostingHalf, WeightReceiver):
    """Waits for the sender's files and reads them."""

    def __init__(self, name: str, config: FilesystemConfig) -> None:
        super().__init__(f"filesystem receiver {name}")
        self._store = StoreDirectory(config.path, config.storage_options)
        self._first_poll_s = config.poll_s or _FIRST_POLL_S[self._store.is_local]
        self._slowest_poll_s = _SLOWEST_POLL_FACTOR * self._first_poll_s
        self._health_check_s = _HEALTH_CHECK_S[self._store.is_local]
        self._directories: dict[str, str] = {}
        """Directory of each sender."""
        self._senders: dict[str, Address] = {}

    def connect(self, topology: Topology, channels: Mapping[str, Channel], deadline: Deadline) -> None:  # noqa: ARG002
        """Wait until every sender has made its directory. Possible at any time while the session lasts."""
        with self._life.call():
            for sender, address in topology.senders.items():
                guard = Guard(self._life, deadline, sender)
                directory = sender_directory(topology, sender, self._life.part)
                self._senders[sender] = address
                while self._store.read_text(f"{directory}/{SENDER_FILE}", guard) is None:
                    self._check_process(sender)
                    self._store.look_again(directory)
                    guard.sleep(self._slowest_poll_s)
                    guard.check(self._store.full(directory))
                self._directories[sender] = directory

    def post(self, bucket: Bucket, sender: str) -> None:
        """Note the bucket; `flush` waits for its file, and reads it straight into the bucket."""
        with self._life.call():
            if sender not in self._directories:
                raise ProtocolError(f"not connected to {sender}.", part=self._life.part)
            self._posted.append(lambda deadline: self._read(bucket, sender, Guard(self._life, deadline, sender)))

    def _read(self, bucket: Bucket, sender: str, guard: Guard) -> None:
        directory = version_directory(self._directories[sender], bucket.version)
        poll_s = self._first_poll_s
        next_check = Deadline.after(self._health_check_s)
        while not read_bucket(self._store, directory, bucket, guard):
            if next_check.expired:
                self._store.look_again(directory)
                self._check_sender(sender, bucket, guard)
                next_check = Deadline.after(self._health_check_s)
            guard.sleep(poll_s)
            guard.check(self._store.full(f"{directory}/{payload_name(bucket)}"))
            poll_s = min(2 * poll_s, self._slowest_poll_s)

    def _check_process(self, sender: str) -> None:
        if is_dead(self._senders[sender]):
            raise PeerLostError("the sender's process is gone.", part=self._life.part, peer=sender)

    def _check_sender(self, sender: str, bucket: Bucket, guard: Guard) -> None:
        """Raise an error if `bucket` will never arrive."""
        self._check_process(sender)
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
