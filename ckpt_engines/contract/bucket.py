"""`Bucket`: the bytes that engines move, and where they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ProtocolError
from .field_docs import document_fields


@dataclass(frozen=True, slots=True)
class FilePart:
    """The place of a bucket in a file that holds several buckets, for persistent engines.

    A file holds several buckets when a tensor continues from one to the next. Readers must find the complete tensor or no file.
    """

    first: int
    """Index of the file's first bucket, which names the file. The other buckets follow it without a gap."""
    offset: int
    """Bytes of the file's buckets before this one."""
    total: int
    """Bytes of all buckets of the file."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """One contiguous run of bytes to send, or to receive into.

    Raises `ProtocolError` when `data` is not contiguous one-dimensional uint8.
    """

    version: int
    """Weight version that the bucket belongs to; version and index identify the bucket within a session."""
    index: int
    """Position in the version, from 0."""
    data: torch.Tensor
    """The bytes to send, or the memory to receive into: contiguous uint8 of one dimension and exactly the bucket's size, on the
    device that the half was made for."""
    after: Any = None
    """On an accelerator, the event that the transfer must wait for; it need not wait for anything else. On a sender the event
    follows the writing of the bytes, on a receiver the last use of the memory. None on a CPU, where both have ended."""
    to_all: bool = True
    """Whether the bucket is sent to every receiver of the connection, so that one broadcast may carry it. Set on both sides."""
    receiver_set: int | None = None
    """Index in `Topology.receiver_sets` of the set whose members get the bucket; None if the bucket's receivers are no such set.
    Set on both sides."""
    turn: int | None = None
    """For a receiver of a collective engine: number of the turn, in which each sender of the connection sends one bucket; None if
    it is unknown. Senders follow their order in the topology within a turn."""
    lasting: bool = False
    """Whether receivers may read the bytes in the sender's memory, where they stay unchanged until `ViewableSender.reclaim` of
    the version has returned. Set on the sender's side, for engines that declare `Capabilities.views`."""
    part: FilePart | None = None
    """Place of the bucket in a file of several buckets, or None when the bucket has a file of its own. Set on both sides, for
    engines that declare `Capabilities.persistent`."""

    def __post_init__(self) -> None:
        if self.data.dtype != torch.uint8 or self.data.dim() != 1 or not self.data.is_contiguous():
            raise ProtocolError(
                f"bucket {self.index} is {self.data.dtype} of shape {tuple(self.data.shape)},"
                " not contiguous one-dimensional uint8.",
                part="bucket",
            )

    def __str__(self) -> str:
        return f"bucket {self.index} of version {self.version}"

    @property
    def nbytes(self) -> int:
        """Size in bytes; may be 0."""
        return self.data.numel()


document_fields(__name__)
