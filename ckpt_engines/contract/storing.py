"""The optional protocol of engines that declare `Capabilities.persistent`: they store versions, which readers find later."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..waits import Deadline
from .engine import WeightSender
from .field_docs import document_fields


def bucket_file_name(index: int) -> str:
    """Return the name of the file whose first bucket is `index`. The documents of `VersionFiles` refer to it."""
    return f"bucket-{index:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """The files in which a persistent engine stores a version, so that other tools can read it. The engine need not parse them.

    A bucket's file is called `bucket_file_name` and holds the bucket's prefix and then its bytes, which together are a complete
    safetensors file. A file of several buckets (`Bucket.part`) holds the first bucket's prefix and then the bytes of all its
    buckets. These are posted one after the other, and readers must not find the file before it is complete.
    """

    version: int
    """Weight version to store."""
    prefixes: Sequence[bytes]
    """Bytes ahead of each bucket, by bucket index; empty for a bucket that continues a file."""
    documents: Mapping[str, str]
    """Text files of the version by file name (``[a-z0-9._-]+``), e.g. its manifest and the safetensors index."""


class StoringSender(WeightSender):
    """The sending half of an engine that stores versions. The thread that makes the other calls also makes these.

    [sender]  ``open_version(files)``           before the version's first bucket
    [sender]  ``commit_version(version)``       when the version serves

    Such a sender has no connection to receivers: `connect` gets no channels, and a bucket is done when it is written.
    """

    @abstractmethod
    def open_version(self, files: VersionFiles, deadline: Deadline) -> None:
        """Prepare to store a version. Called before its first bucket.

        Raises `StorageError`, `DeadlineExceededError` or `ClosedError`.
        """

    @abstractmethod
    def commit_version(self, version: int, documents: Mapping[str, str], deadline: Deadline) -> None:
        """Store `documents`, text by file name, with `version`, and then make it the newest version that readers find.

        Called when the version serves. Raises as `open_version`.
        """


document_fields(__name__)
