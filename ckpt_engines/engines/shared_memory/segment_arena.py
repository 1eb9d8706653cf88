"""`SegmentArena`: the segments of one engine object, which outlive its senders."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref

import torch

from ...errors import StorageError
from .segments import OwnedSegment, SegmentKind

_MIB = 1 << 20


class SegmentArena:
    """Makes segments within a limit, and knows which one a bucket lies in. Every call may come from any thread.

    Segments have numbers, which are never used again. When the arena itself is gone, so are its segments.

    Args:
        part: Name of the engine for error messages.
        kind: What the segments are.
        limit_bytes: How much memory they may take together; None leaves that to the machine.
    """

    def __init__(self, part: str, kind: SegmentKind, limit_bytes: int | None) -> None:
        self._part = part
        self._kind = kind
        self._limit_bytes = sys.maxsize if limit_bytes is None else limit_bytes
        self._lock = threading.Lock()
        self._taken_bytes = 0
        self._numbers = itertools.count()
        self._segments: dict[int, OwnedSegment] = {}
        weakref.finalize(self, _retire_all, self._segments).atexit = False

    def make(self, nbytes: int, device: torch.device, *, generous_bytes: int = 0) -> tuple[int, OwnedSegment]:
        """A new segment of `nbytes`, or of up to `generous_bytes` where the limit allows; its number, and itself.

        Raises `StorageError` when the limit or the machine's memory does not suffice.
        """
        with self._lock:
            room = self._limit_bytes - self._taken_bytes
            if nbytes > room:
                raise self._too_much(nbytes)
            nbytes = max(1, nbytes, min(generous_bytes, room))
            self._taken_bytes += nbytes
        try:
            segment = self._kind.create(nbytes, device)  # takes its time, and nobody need wait for it
        except BaseException:
            with self._lock:
                self._taken_bytes -= nbytes
            raise
        with self._lock:
            number = next(self._numbers)
            self._segments[number] = segment
        return number, segment

    def _too_much(self, nbytes: int) -> StorageError:
        return StorageError(
            f"{nbytes / _MIB:.1f} MiB for buckets would exceed max_shared_mib ({self._limit_bytes // _MIB} MiB),"
            f" of which {self._taken_bytes / _MIB:.1f} MiB are in use.",
            part=self._part,
            hint="Raise checkpoint_engine.options.max_shared_mib, or leave it out.",
        )

    def find(self, data: torch.Tensor) -> tuple[int, OwnedSegment, int] | None:
        """Number of the segment in which contiguous `data` lies, the segment, and where in it; None when in none."""
        with self._lock:
            for number, segment in self._segments.items():
                offset = segment.offset_of(data)
                if offset is not None:
                    return number, segment, offset
        return None

    def numbers(self) -> frozenset[int]:
        """Of the segments that are there."""
        with self._lock:
            return frozenset(self._segments)

    def discard(self, number: int) -> None:
        """Give up a segment; nothing happens when it has gone already."""
        with self._lock:
            segment = self._segments.pop(number, None)
            if segment is not None:
                self._taken_bytes -= segment.nbytes
        if segment is not None:
            segment.retire()

    def free(self, memory: torch.Tensor) -> None:
        """Give up the segment that `memory` is a part of; nothing happens when it is part of none."""
        start = memory.untyped_storage().data_ptr()  # also of a part of no bytes
        with self._lock:
            found = [number for number, segment in self._segments.items() if segment.data.data_ptr() == start]
        for number in found:
            self.discard(number)


def _retire_all(segments: dict[int, OwnedSegment]) -> None:
    while segments:
        segments.popitem()[1].retire()
