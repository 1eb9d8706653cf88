"""What the engines share whose receivers map the sender's memory, ``shm`` and ``cuda_ipc``: the notion of a segment.

A *segment* is a run of one process's memory that another process can map. What it is, and how it is mapped and copied, is the
`SegmentKind`'s business; who owns it the `SegmentArena`'s; how receivers hear of it that of the two halves.
"""

from __future__ import annotations

import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...channels.channel import Address, Channel
from ...errors import ProtocolError


def close_descriptors(descriptors: Iterable[int]) -> None:
    """Close file descriptors that came with a segment and that nobody uses. Never raises."""
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)


class OwnedSegment(ABC):
    """A segment in the process that made it."""

    nbytes: int
    data: torch.Tensor
    """All of it as contiguous one-dimensional uint8. Keeps the memory alive by itself."""

    @abstractmethod
    def describe(self) -> tuple[Mapping[str, Any], Sequence[int]]:
        """What a receiver needs to map it: JSON data, and file descriptors that stay the sender's."""

    def copy_in(self, data: torch.Tensor, after: Any) -> Any:
        """Copy contiguous uint8 `data` to its beginning once the event `after` has passed; the event when that is done."""
        del after
        self.data[: data.numel()].copy_(data)

    def publish(self, after: Any) -> None:  # noqa: B027 - host memory needs no such mark
        """A bucket is about to be announced, which is there when the event `after` has passed."""

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

    def written(self) -> bool:
        """Whether what was announced last is there."""
        return True

    @abstractmethod
    def start_copy(self, offset: int, into: torch.Tensor, after: Any) -> Callable[[], bool] | None:
        """Start to copy as many bytes as `into` has from `offset` on, once the event `after` has passed.

        Returns what tells whether they are there, or None when they are.
        """

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """The bytes where they lie, only to be read; the tensor keeps the mapping alive. Not every kind can."""
        raise ProtocolError(f"{nbytes} bytes at {offset} cannot be shown.", part=type(self).__name__)

    def copied(self) -> bool:
        """Whether every copy that was started is over, successful or not."""
        return True

    @abstractmethod
    def close(self) -> None:
        """Unmap it as soon as no tensor looks at it any more. Not before it is `copied`."""


class SegmentKind(ABC):
    """Makes and maps the segments of one engine or half."""

    copies_at_once: ClassVar[bool] = False
    """Whether copies go on in the background, several at a time."""

    def facts(self, device: torch.device) -> Mapping[str, Any]:  # noqa: ARG002
        """[sender] JSON data for the address of a half whose buckets live on `device`."""
        return {}

    def check(self, facts: Address, device: torch.device, part: str, peer: str) -> None:  # noqa: B027 - one host is enough for most
        """[receiver] Raise `TransportError` when segments of the sender with this address cannot be copied to `device`."""

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

    def hang_up(self, channels: Iterable[Channel], segments: Iterable[OwnedSegment]) -> None:  # noqa: B027 - see above
        """[sender] The connections to `channels` are about to be closed; who is behind them may still map `segments`."""
