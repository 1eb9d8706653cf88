"""The memory that ``shm`` and ``cuda_ipc`` share between processes: the bases of segments, and of the arena that owns them."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from ...channels.channel import Address, Channel
from ...errors import ProtocolError, StorageError

_MIB = 1 << 20


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


class SegmentArena(ABC):
    """Makes the segments of one engine object, which outlive its senders, and maps those of other processes. Thread-safe.

    All segments together may have `limit_bytes`; None for no limit but the machine's. They are retired when the arena is
    collected. `part` is the engine's name for error messages.
    """

    copies_in_background: ClassVar[bool] = False
    """Whether copies continue after `SegmentMapping.start_copy`, several at a time."""

    def __init__(self, part: str, limit_bytes: int | None = None) -> None:
        self._part = part
        self._limit_bytes = sys.maxsize if limit_bytes is None else limit_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._numbers = itertools.count()
        self._segments: dict[int, Segment] = {}
        """The segments that are not discarded, by number."""
        weakref.finalize(self, _retire_all, self._segments).atexit = False

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

    def make(self, nbytes: int, device: torch.device) -> Segment:
        """Return a new segment of at least `nbytes`.

        Raises `StorageError` when the limit or the machine's memory does not suffice.
        """
        with self._lock:
            left = self._limit_bytes - self._used_bytes
            if nbytes > left:
                raise StorageError(
                    f"{nbytes / _MIB:.1f} MiB for buckets would exceed max_shared_mib ({self._limit_bytes // _MIB} MiB),"
                    f" of which {self._used_bytes / _MIB:.1f} MiB are in use.",
                    part=self._part,
                    hint="Raise checkpoint_engine.options.max_shared_mib, or leave it out.",
                )
            nbytes = max(1, nbytes)
            self._used_bytes += nbytes
        try:
            segment = self.create(nbytes, device)  # without the lock, since it takes long
        except BaseException:
            with self._lock:
                self._used_bytes -= nbytes
            raise
        with self._lock:
            segment.number = next(self._numbers)
            self._segments[segment.number] = segment
        return segment

    def find(self, data: torch.Tensor) -> tuple[Segment, int] | None:
        """Return the segment in which contiguous `data` lies, and the position in it; None when it lies in no segment."""
        with self._lock:
            for segment in self._segments.values():
                offset = data.data_ptr() - segment.data.data_ptr()
                if 0 <= offset <= segment.nbytes - data.numel():
                    return segment, offset
        return None

    def numbers(self) -> frozenset[int]:
        """Return the numbers of the segments that are not discarded."""
        with self._lock:
            return frozenset(self._segments)

    def discard(self, segment: Segment) -> None:
        """Retire a segment. Does nothing when that was done already."""
        with self._lock:
            if self._segments.pop(segment.number, None) is None:
                return
            self._used_bytes -= segment.nbytes
        segment.retire()

    def free(self, memory: torch.Tensor) -> None:
        """Retire the segment that `memory` is a part of. Does nothing when it is part of none."""
        start = memory.untyped_storage().data_ptr()  # where `memory` has no bytes, its own pointer is null
        with self._lock:
            found = [segment for segment in self._segments.values() if segment.data.data_ptr() == start]
        for segment in found:
            self.discard(segment)


def _retire_all(segments: dict[int, Segment]) -> None:
    while segments:
        segments.popitem()[1].retire()


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
