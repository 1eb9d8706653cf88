"""What an engine adds that declares `Capabilities.persistent`: it stores versions, which readers find by themselves."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..deadline import Deadline
from .engine import WeightSender
from .field_docs import document_fields


def bucket_file_name(index: int) -> str:
    """Name of the file that begins with bucket `index`, in a persistent engine; `VersionFiles` documents refer to it."""
    return f"bucket-{index:05d}.safetensors"


@dataclass(frozen=True, slots=True)
class VersionFiles:
    """How a persistent engine stores a version so that other tools can read it. The engine need not understand it.

    The file of a bucket is its prefix followed by its bytes, and is then a complete safetensors file called `bucket_file_name`.
    Where several buckets make a file (`Bucket.part`), it is the first one's prefix followed by the bytes of all. They are sent
    one after the other, and readers must not find the file before it is complete.
    """

    version: int
    """Weight version that is stored."""
    prefixes: Sequence[bytes]
    """Bytes ahead of each bucket, by bucket index; none ahead of one that continues a file."""
    documents: Mapping[str, str]
    """Text files of the version by file name (``[a-z0-9._-]+``), e.g. its manifest and the safetensors index."""


class StoringSender(WeightSender):
    """The sending half of an engine that stores versions. Further calls, from the thread of the others.

    [sender]  ``open_version(files)``           before the version's first bucket
    [sender]  ``commit_version(version)``       the version serves

    Nobody meets such a sender: its `connect` gets no channels, and a bucket is done when it is written.
    """

    @abstractmethod
    def open_version(self, files: VersionFiles, deadline: Deadline) -> None:
        """Prepare to store a version. Called before its first bucket."""

    @abstractmethod
    def commit_version(self, version: int, documents: Mapping[str, str], deadline: Deadline) -> None:
        """`version` serves: store `documents` (text by file name) with it, then make it the newest one that readers find."""


document_fields(__name__)
