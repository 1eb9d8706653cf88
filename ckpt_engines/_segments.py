"""What the engines share whose receivers map the sender's memory, ``shm`` and ``cuda_ipc``: the notion of a segment.

A *segment* is a run of one process's memory that another process can map. What it is, and how it is mapped and copied, is the
`SegmentKind`'s business; who owns it the `SegmentArena`'s; how receivers hear of it that of the two halves.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from ._channel import Channel
from .contract import Address
from .errors import ProtocolError


class OwnedSegment(ABC):
    """A segment in the process that made it."""

    nbytes: int
    data: torch.Tensor
    """All of it as contiguous one-dimensional uint8. Keeps the memory alive by itself."""

    @abstractmethod
    def describe(self) -> tuple[Mapping[str, Any], Sequence[int]]:
        """What a receiver needs to map it: JSON data, and file descriptors that stay the sender's."""

    def publish(self) -> None:  # noqa: B027 - host memory needs no such mark
        """Mark that whatever was written until now belongs to the bucket about to be announced."""

    def offset_of(self, data: torch.Tensor) -> int | None:
        """Where contiguous `data` lies in this segment, None when it does not."""
        offset = data.data_ptr() - self.data.data_ptr()
        return offset if 0 <= offset <= self.nbytes - data.numel() else None

    @abstractmethod
    def retire(self) -> None:
        """Its owner is done with it. Receivers may still map it, and tensors look at it: the memory stays until none does."""


class MappedSegment(ABC):
    """A segment in a process that maps it."""

    nbytes: int

    @abstractmethod
    def copy_out(self, offset: int, into: torch.Tensor, wait: Callable[[Callable[[], bool]], None]) -> None:
        """Copy as many bytes as `into` has from `offset` on, and return when they are there.

        ``wait(done)`` asks `done` until it is true, and raises when the deadline passes or the sender is gone.
        """

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes where they lie, only to be read; the tensor keeps the mapping alive. Not every kind can."""
        raise ProtocolError(f"{nbytes} bytes at {offset} cannot be shown.", part=type(self).__name__)

    @abstractmethod
    def close(self) -> None:
        """Unmap it as soon as no tensor looks at it any more."""


class SegmentKind(ABC):
    """Makes and maps the segments of one engine or half."""

    def facts(self) -> Mapping[str, Any]:
        """[sender] JSON data for this half's address."""
        return {}

    def check(self, facts: Address, part: str, peer: str) -> None:  # noqa: B027 - one host is enough for most
        """[receiver] Raise `TransportError` when segments of the sender with this address cannot be mapped here."""

    @abstractmethod
    def create(self, nbytes: int, device: torch.device) -> OwnedSegment:
        """[sender] A new segment of at least `nbytes` on `device`; `StorageError` when there is too little memory."""

    @abstractmethod
    def adopt(
        self, nbytes: int, description: Mapping[str, Any], descriptors: Sequence[int], device: torch.device
    ) -> MappedSegment:
        """[receiver] Map a segment, to be copied from to `device`, and own `descriptors` whatever happens.

        `ProtocolError` when the description makes no sense, `TransportError` when it cannot be mapped.
        """

    def hang_up(self, channels: Iterable[Channel], segments: Iterable[OwnedSegment]) -> None:  # noqa: ARG002
        """[sender] Close `channels`; the receivers behind them may map `segments` for a while yet."""
        for channel in channels:
            channel.close()
