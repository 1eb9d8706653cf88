"""The filesystem engine: versions as files in a directory that all sides see, local, NFS or any fsspec URL.

Layout, where ``n`` is the sender's place in the topology::

    <path>/latest.json                                      the newest committed version, and the other versions that are kept
    <path>/<session>/sender-<n>/sender.json                 the process that writes here; exists while the session lasts
    <path>/<session>/sender-<n>/v<version>/
        bucket-00000.safetensors                            this bucket, or this and the next ones; exists once complete
        manifest.json, model.safetensors.index.json         the framework's documents, written before the buckets or at the commit
        COMMITTED                                           exists once the version has served

A version stays until newer ones are *committed*: opening the next one removes nothing, so that receivers may still read. After
a commit the newest `keep_versions` committed versions stay, also after `close` and over sessions. Every older version is
removed, and every older one that was never committed. Closing removes uncommitted versions; those of a killed sender are removed
by the next sender, which takes a sender of another session on another host or in another container for killed.

Files are found by their names. Listings, which network file systems may serve from a cache, serve only to find leftovers. An NFS
client also remembers for a while (``acdirmax``, a minute by default) that a file was *not* there. Receivers make it forget by
opening the directories again; where that is not enough, mount with ``lookupcache=positive``.
"""

from __future__ import annotations

import secrets

import torch

from ...contract.capabilities import Capabilities, Delivery
from ...contract.engine import API_VERSION, CheckpointEngine, WeightReceiver, WeightSender
from ...waits import Deadline
from .config import FilesystemConfig
from .receiver import FilesystemReceiver
from .sender import FilesystemSender
from .store_directory import StoreDirectory, standalone_guard


class FilesystemEngine(CheckpointEngine):
    """CPU memory through files."""

    api_version = API_VERSION
    config: FilesystemConfig
    config_type = FilesystemConfig
    capabilities = Capabilities(
        devices=frozenset({"cpu"}), delivery=frozenset({Delivery.STORE}), persistent=True, elastic=True, channels=False
    )

    def check(self, deadline: Deadline) -> None:
        """See `CheckpointEngine.check`. Writes a small file to the directory, replaces it, and removes it."""
        store = StoreDirectory(self.config.path, self.config.storage_options)
        name = f"probe-{secrets.token_hex(4)}"
        with standalone_guard("filesystem engine", deadline) as guard, store.without_new_directories(guard):
            store.write_text(name, "", guard)
            try:
                store.write_text(name, "", guard)
            finally:
                store.remove(name, guard)

    def make_sender(self, name: str, device: torch.device) -> WeightSender:  # noqa: ARG002
        """See `CheckpointEngine.make_sender`."""
        return FilesystemSender(name, self.config)

    def make_receiver(self, name: str, device: torch.device) -> WeightReceiver:  # noqa: ARG002
        """See `CheckpointEngine.make_receiver`."""
        return FilesystemReceiver(name, self.config)
