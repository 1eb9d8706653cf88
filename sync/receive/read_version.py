"""`read_version`: reads the newest committed version of the ``filesystem`` engine, without taking part in a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weightlane.ckpt_engines import Bucket, Deadline, StagingMemoryError, StorageError
from weightlane.ckpt_engines.engines.filesystem.versions import StoredVersion

from ..version.bucket_checksums import CHECKSUMS_FILE, checksums_of_document, verify
from ..version.manifest import Manifest
from ..version.safetensors_files import MANIFEST_FILE, manifest_of_document


def read_version(
    path_or_url: str, storage_options: Mapping[str, Any] | None = None, *, timeout_s: float = 600.0
) -> tuple[Manifest, dict[str, torch.Tensor]]:
    """Read the newest committed version that the ``filesystem`` engine stores at `path_or_url`, and verify every checksum.

    Works during a run and after its end. A version published with ``sync.integrity = "off"`` has no checksums.

    Args:
        path_or_url: The engine's ``path``.
        storage_options: The engine's ``storage_options``.
        timeout_s: Limit in seconds.

    Returns:
        The manifest of the version, and its tensors by name: CPU tensors that share memory.

    Raises:
        StorageError: No version was committed there, or a file is missing or cannot be read.
        CorruptBucketError: A file's bytes have changed.
        ProtocolError: A file is malformed, for example too short.
        ConfigError: There is no such file system.
        StagingMemoryError: The version is larger than this machine's memory.
        DeadlineExceededError: `timeout_s` has passed.
    """
    deadline = Deadline.after(timeout_s)
    stored = StoredVersion.newest(path_or_url, storage_options, deadline)
    while True:
        try:
            return _read(stored, deadline)
        except StorageError:
            # A run may have replaced the version in the meantime.
            newest = StoredVersion.newest(path_or_url, storage_options, deadline)
            if newest.location == stored.location:
                raise
            stored = newest


def _read(stored: StoredVersion, deadline: Deadline) -> tuple[Manifest, dict[str, torch.Tensor]]:
    manifest = manifest_of_document(stored.document(MANIFEST_FILE, deadline))
    try:
        memory = torch.empty(manifest.total_bytes, dtype=torch.uint8)
    except RuntimeError as error:
        raise StagingMemoryError(
            f"there is no memory for the {manifest.total_bytes / 2**20:.0f} MiB of version {stored.version}.",
            part=f"stored version {stored.location}",
        ) from error
    checksums = None
    if manifest.checksummed:
        checksums = checksums_of_document(stored.document(CHECKSUMS_FILE, deadline), manifest.bucket_count)
    for index in range(manifest.bucket_count):
        start, stop = manifest.window(index)
        data = memory[start:stop]
        stored.read(Bucket(stored.version, index, data, part=manifest.part(index)), deadline)
        if checksums is not None:
            verify(data, checksums[index], stored.version, index, peer=stored.location)
    return manifest, manifest.views(memory)
