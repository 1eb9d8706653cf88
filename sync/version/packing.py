"""Packing: from the snapshots of trainer ranks to buckets.

Every trainer rank copies only its own shards into one flat *snapshot* in the wire dtype. If the bytes of a bucket lie in a
snapshot as in the stream, the bucket is sent from it in place. Otherwise the bucket is filled from one snapshot, or from those of
all ranks, so that no rank ever holds a large tensor in full.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch

from .manifest import ALIGNMENT_BYTES, Manifest
from .snapshot_slices import SnapshotSlice
from .strided_copy import BucketCopies, StridedCopy, copy_strided
from .tensor_spec import Shard

_KEPT_WINDOWS = 1 << 14
"""Limit for the windows whose copies are kept for the next version, which bounds their memory."""


class CopyTable:
    """The copies between one rank's snapshot and the stream."""

    def __init__(self, copies: Iterable[StridedCopy]) -> None:
        self._copies = sorted(copies, key=lambda copy: copy.stream.start)
        # The largest end up to each copy: the rows of one copy may lie between the rows of another.
        self._reach = list(accumulate((copy.stream.end for copy in self._copies), max))
        self._windows: dict[tuple[int, int], BucketCopies] = {}

    @classmethod
    def of(cls, slices: Iterable[SnapshotSlice], layout: Manifest) -> CopyTable:
        """The table of a rank whose snapshot has these slices of the stream `layout`."""
        offsets = layout.offsets
        return cls(copy for each in slices for copy in each.copies(offsets[each.tensor]))

    def within(self, start: int, stop: int) -> Iterator[StridedCopy]:
        """The parts of the copies in the stream window [`start`, `stop`)."""
        for copy in self._copies[bisect_right(self._reach, start) :]:
            if copy.stream.start >= stop:
                return
            yield from copy.within(start, stop)

    def window(self, start: int, stop: int) -> BucketCopies:
        """The copies of the stream window [`start`, `stop`); cached."""
        window = self._windows.get((start, stop))
        if window is None:
            if len(self._windows) >= _KEPT_WINDOWS:
                self._windows.clear()
            window = self._windows[start, stop] = BucketCopies.of(self.within(start, stop))
        return window

    def bytes_within(self, start: int, stop: int) -> int:
        """Bytes of the window that this rank holds."""
        return self.window(start, stop).nbytes

    def snapshot_end(self, start: int, stop: int) -> int:
        """One past the last byte of the snapshot that the window needs."""
        return self.window(start, stop).snapshot_end


def compact_places(shards: Sequence[Shard]) -> list[int]:
    """First byte of each shard in a snapshot where aligned shards follow each other."""
    places, place = [], 0
    for shard in shards:
        places.append(place)
        place += -(-shard.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places


def stream_places(shards: Sequence[Shard], layout: Manifest) -> list[int] | None:
    """First byte of each shard in a snapshot that is the stream itself; None if a shard is not contiguous in its tensor."""
    offsets = {spec.name: offset for spec, offset in zip(layout.specs, layout.offsets, strict=True)}
    places = []
    for shard in shards:
        rows = shard.box.rows(shard.spec.shape)
        if shard.numel and (rows is None or rows[2] > 1):
            return None  # columns
        places.append(offsets[shard.spec.name] + (rows[0] if rows else 0) * shard.spec.dtype.itemsize)
    return places


def copy_runs(snapshot: torch.Tensor, table: CopyTable, start: int, stop: int, payload: torch.Tensor) -> None:
    """Copy this rank's bytes of the window to their places in `payload` (uint8, as long as the window)."""
    for copy in table.window(start, stop).copies:
        copy_strided(payload, copy.stream.moved(-start), snapshot, copy.snapshot)


def gather_runs(snapshot: torch.Tensor, table: CopyTable, start: int, stop: int, packed: torch.Tensor) -> torch.Tensor:
    """This rank's bytes of the window, back to back: a view of the snapshot if they are contiguous there, else in `packed`."""
    window = table.window(start, stop)
    if window.unbroken:
        return snapshot[window.snapshot_end - window.nbytes : window.snapshot_end]
    for copy in window.copies:
        copy_strided(packed, copy.packed, snapshot, copy.snapshot)
    return packed[: window.nbytes]


def scatter_runs(packed: torch.Tensor, table: CopyTable, start: int, stop: int, payload: torch.Tensor) -> None:
    """Copy bytes that `gather_runs` returned on another rank to their places in `payload`."""
    for copy in table.window(start, stop).copies:
        copy_strided(payload, copy.stream.moved(-start), packed, copy.packed)
