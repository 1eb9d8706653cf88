"""`SegmentArena`: the segments of one engine object, which outlive its senders."""

from __future__ import annotations

import itertools
import sys
import threading
import weakref

import torch

from ...errors import StorageError
from .segment_base import Segment, SegmentKind

_MIB = 1 << 20


class SegmentArena:
    """Makes segments of a `kind`, and finds the one in which a bucket lies. Any thread may call it.

    All segments together may have `limit_bytes`; None for no limit but the machine's. They are retired when the arena is
    collected. `part` is the engine's name for error messages.
    """

    def __init__(self, part: str, kind: SegmentKind, limit_bytes: int | None) -> None:
        self._part = part
        self._kind = kind
        self._limit_bytes = sys.maxsize if limit_bytes is None else limit_bytes
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._numbers = itertools.count()
        self._segments: dict[int, Segment] = {}
        """The segments that are not discarded, by number."""
        weakref.finalize(self, _retire_all, self._segments).atexit = False

    def make(self, nbytes: int, device: torch.device, *, preferred_bytes: int = 0) -> Segment:
        """Return a new segment of at least `nbytes`, and of up to `preferred_bytes` where the limit allows.

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
            nbytes = max(1, nbytes, min(preferred_bytes, left))
            self._used_bytes += nbytes
        try:
            segment = self._kind.create(nbytes, device)  # without the lock, since it takes long
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
                offset = segment.offset_of(data)
                if offset is not None:
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
