"""`Segment`, `SegmentMapping` and `SegmentKind`: bases of the memory that ``shm`` and ``cuda_ipc`` share between processes."""

from __future__ import annotations

import contextlib
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...channels.channel import Address, Channel
from ...errors import ProtocolError


class Segment(ABC):
    """One block of shared memory, in the process that made it."""

    number: int = -1
    """Identifies the segment in messages. The `SegmentArena` never uses a number twice."""
    nbytes: int
    data: torch.Tensor
    """The segment as contiguous one-dimensional uint8. The tensor keeps the memory alive."""

    @abstractmethod
    def describe(self) -> tuple[Mapping[str, Any], Sequence[int]]:
        """Return JSON data and file descriptors with which a receiver maps the segment. The sender keeps the descriptors."""

    def copy_in(self, data: torch.Tensor, after: Any) -> Any:
        """Copy contiguous uint8 `data` to the segment's beginning once the event `after` has passed.

        Returns the event that passes when the copy is done; None for a copy that is done.
        """
        del after
        self.data[: data.numel()].copy_(data)

    def publish(self, after: Any) -> None:  # noqa: B027 - host memory needs no such mark
        """Prepare the announcement of a bucket that is complete when the event `after` has passed."""

    def offset_of(self, data: torch.Tensor) -> int | None:
        """Return the position of contiguous `data` in this segment; None when it lies elsewhere."""
        offset = data.data_ptr() - self.data.data_ptr()
        return offset if 0 <= offset <= self.nbytes - data.numel() else None

    @abstractmethod
    def retire(self) -> None:
        """Stop using the segment, as its owner. The memory stays until no receiver maps it and no tensor refers to it."""


class SegmentMapping(ABC):
    """A segment of another process, mapped in this one."""

    nbytes: int

    def written(self) -> bool:
        """Whether the bucket that was announced last is complete."""
        return True

    @abstractmethod
    def start_copy(self, offset: int, into: torch.Tensor, after: Any) -> Callable[[], bool] | None:
        """Start to fill `into` (contiguous uint8) from `offset` on, once the event `after` has passed.

        Returns a function that tells whether the copy is done, or None when it is.
        """

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """Return `nbytes` of the segment from `offset` on, as read-only uint8 that keeps the mapping alive.

        Raises `ProtocolError` for kinds of segments that cannot be viewed.
        """
        raise ProtocolError(f"{nbytes} bytes at {offset} cannot be viewed.", part=type(self).__name__)

    def copied(self) -> bool:
        """Whether every copy that was started is over, successful or not."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Unmap the segment as soon as no tensor refers to it. Call this only when all copies of the mapping are over."""


class SegmentKind(ABC):
    """Makes and maps the segments of one engine or half."""

    copies_in_background: ClassVar[bool] = False
    """Whether copies continue after `SegmentMapping.start_copy`, several at a time."""

    def facts(self, device: torch.device) -> Mapping[str, Any]:  # noqa: ARG002
        """[sender] Return JSON data for the address of a half whose buckets are on `device`."""
        return {}

    def check(self, facts: Address, device: torch.device, part: str, peer: str) -> None:  # noqa: B027 - one host is enough for most
        """[receiver] Raise `TransportError` when segments of the sender with this address cannot be copied to `device`."""

    @abstractmethod
    def create(self, nbytes: int, device: torch.device) -> Segment:
        """[sender] Return a new segment of at least `nbytes` on `device`. Raises `StorageError` for lack of memory."""

    @abstractmethod
    def map_segment(
        self, nbytes: int, description: Mapping[str, Any], descriptors: Sequence[int], device: torch.device
    ) -> SegmentMapping:
        """[receiver] Map a segment, for copies to `device`. Closes `descriptors`, also when it fails.

        Raises `ProtocolError` when the description is malformed, `TransportError` when the segment cannot be mapped.
        """

    def before_close(self, channels: Iterable[Channel], segments: Iterable[Segment]) -> None:  # noqa: B027 - see above
        """[sender] Prepare the closing of `channels`, whose receivers may still map `segments`."""


def close_descriptors(descriptors: Iterable[int]) -> None:
    """Close file descriptors that a sender passed and that no mapping uses. Never raises."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def duplicate_sockets(channels: Iterable[Channel]) -> list[socket.socket]:
    """Return copies of the channels' sockets, which keep the connections open after the channels close. Skips closed ones."""
    copies = []
    for channel in channels:
        with contextlib.suppress(OSError):
            copies.append(socket.socket(fileno=os.dup(channel.fileno())))
    return copies
