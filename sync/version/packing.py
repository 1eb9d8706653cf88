"""From local shards to buckets: where each byte of a rank's snapshot belongs in the stream.

Every trainer rank copies its own shards, and nothing else, into one flat *snapshot* in the wire dtype. Where one rank holds
everything its snapshot is the stream, and buckets are sent from it in place. Elsewhere a bucket is filled from the snapshots of
all ranks: no rank ever holds a full large tensor.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import torch

from .manifest import ALIGNMENT_BYTES, Manifest
from .stream_parts import SnapshotPart
from .strided_copy import BucketCopies, StridedCopy, copy_strided
from .tensor_spec import Held

_KEPT_WINDOWS = 1 << 14


class CopyTable:
    """Where the bytes of one rank's snapshot belong in the stream."""

    def __init__(self, pieces: Iterable[StridedCopy]) -> None:
        self._pieces = sorted(pieces, key=lambda piece: piece.stream.start)
        self._reach = list(accumulate((piece.stream.end for piece in self._pieces), max))
        """How far pieces reach, up to each: columns of a tensor lie between each other."""
        self._windows: dict[tuple[int, int], BucketCopies] = {}

    @classmethod
    def of(cls, parts: Iterable[SnapshotPart], layout: Manifest) -> CopyTable:
        """Of what a rank has of the stream `layout`."""
        offsets = layout.offsets
        return cls(piece for part in parts for piece in part.pieces(offsets[part.number]))

    def within(self, start: int, stop: int) -> Iterator[StridedCopy]:
        """The parts of this rank's pieces that lie in the stream window [`start`, `stop`)."""
        for piece in self._pieces[bisect_right(self._reach, start) :]:
            if piece.stream.start >= stop:
                return
            yield from piece.within(start, stop)

    def window(self, start: int, stop: int) -> BucketCopies:
        """How the runs of the stream window [`start`, `stop`) are copied; worked out once unless there are too many."""
        window = self._windows.get((start, stop))
        if window is None:
            if len(self._windows) >= _KEPT_WINDOWS:
                self._windows.clear()
            window = self._windows[start, stop] = BucketCopies.of(self.within(start, stop))
        return window

    def bytes_within(self, start: int, stop: int) -> int:
        """How many bytes of the window this rank holds."""
        return self.window(start, stop).nbytes

    def snapshot_end(self, start: int, stop: int) -> int:
        """One past the last byte of the snapshot that is needed for the window."""
        return self.window(start, stop).snapshot_end


def compact_places(shards: Sequence[Held]) -> list[int]:
    """First byte of each shard in a snapshot that holds nothing else, aligned."""
    places, place = [], 0
    for shard in shards:
        places.append(place)
        place += -(-shard.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places


def stream_places(held: Sequence[Held], layout: Manifest) -> list[int] | None:
    """First byte of each slice in a snapshot that is the stream of whole tensors itself; None if one cannot lie like that."""
    offsets = {spec.name: offset for spec, offset in zip(layout.specs, layout.offsets, strict=True)}
    places = []
    for mine in held:
        rows = mine.box.rows(mine.spec.shape)
        if mine.numel and (rows is None or rows[2] > 1):
            return None  # columns
        places.append(offsets[mine.spec.name] + (rows[0] if rows else 0) * mine.spec.dtype.itemsize)
    return places


def copy_runs(snapshot: torch.Tensor, table: CopyTable, start: int, stop: int, payload: torch.Tensor) -> None:
    """Copy what this rank holds of the window into its places in `payload` (uint8, window-sized)."""
    for strip in table.window(start, stop).strips:
        copy_strided(payload, strip.stream.moved(-start), snapshot, strip.snapshot)


def gather_runs(snapshot: torch.Tensor, table: CopyTable, start: int, stop: int, packed: torch.Tensor) -> torch.Tensor:
    """What this rank holds of the window, back to back: in the snapshot, if it lies there so, else in `packed`."""
    window = table.window(start, stop)
    if window.unbroken:
        return snapshot[window.snapshot_end - window.nbytes : window.snapshot_end]
    for strip in window.strips:
        copy_strided(packed, strip.packed, snapshot, strip.snapshot)
    return packed[: window.nbytes]


def scatter_runs(packed: torch.Tensor, table: CopyTable, start: int, stop: int, payload: torch.Tensor) -> None:
    """Undo `gather_runs` on the rank that fills the bucket."""
    for strip in table.window(start, stop).strips:
        copy_strided(payload, strip.stream.moved(-start), packed, strip.packed)
