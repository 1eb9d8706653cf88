"""The sender's side of a delta: the changes of a rank's snapshot since the version that the receivers have."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from weightlane.ckpt_engines.runtime.cpus import usable_cpus
from weightlane.ckpt_engines.runtime.threads import DaemonThreads

from ...version.manifest import ALIGNMENT_BYTES, CODEC_DELTA, Manifest, aligned
from ...version.manifest_message import DeltaSegment
from ...version.packing import CopyTable, SnapshotSlice
from ...version.tensor_spec import INTEGERS, Shard
from .format import Encoded, TooDense, encode

_WINDOWS, _WINDOW_NUMEL = 256, 512
"""Size of a density sample: this many windows of at most this many elements."""
_CAPACITY = 1 / 3
"""Share of the dense bytes that a delta may take; longer ones are sent dense. Receivers need several times a delta's bytes."""
_SEGMENT_NUMEL = 1 << 23
"""Limit for the elements of a segment, so that several threads encode a large tensor, and receivers decode it as it arrives."""
_MOST_THREADS = 4
"""Limit for encoding threads. A few saturate the memory, which limits comparing, and the trainer has work of its own."""
_AHEAD = 2
"""Segments per thread that are encoded ahead of the consumer, so that no thread idles."""
_BUCKETS = 16
"""Buckets of a delta, so that receivers decode some while others are on the wire."""
_LEAST_BUCKET_BYTES = 512 << 10
"""Lower limit for a delta's buckets: smaller ones cost more messages than they save time."""


@dataclass(frozen=True, slots=True)
class RankDelta:
    """One rank's part of a delta."""

    segments: tuple[DeltaSegment, ...]
    changed: int
    """Elements whose bits differ."""
    elements: int


class DeltaEncoder:
    """Compares two snapshots of a rank, in which its shards begin at the bytes `places`; on CPU with several threads."""

    def __init__(self, shards: Sequence[Shard], places: Sequence[int]) -> None:
        self._shards = [
            (place, shard)
            for place, shard in sorted(zip(places, shards, strict=True), key=lambda placed: placed[0])
            if shard.numel
        ]
        self._elements = sum(shard.numel for shard in shards)
        self.capacity_bytes = int(_CAPACITY * sum(shard.nbytes for shard in shards))
        """Limit for the bytes of a delta."""
        self._workers = min(_MOST_THREADS, usable_cpus())
        # Started for the first delta and kept, because every thread keeps memory for its comparisons.
        self._threads: DaemonThreads | None = None

    def encode(
        self,
        slices: Sequence[SnapshotSlice],
        base: torch.Tensor,
        snapshot: torch.Tensor,
        ready: Callable[[int], None],
        taken: Callable[[], bool],
        room_for: Callable[[int], torch.Tensor],
    ) -> RankDelta | TooDense:
        """Encode the changes from `base` to `snapshot`, both 1-D uint8, which may still be being taken.

        Args:
            slices: The slices of the stream that this rank sends, in the stream's order.
            base: The snapshot of the version that the receivers have.
            snapshot: The snapshot of the new version.
            ready: ``ready(n)`` returns once the snapshot's first `n` bytes are there.
            taken: Whether the snapshot is complete. Until then one core is left for it, because the optimizer waits for it.
            room_for: ``room_for(n)`` returns memory of at least `n` bytes, 1-D uint8, for all segments back to back.
        """
        cut = [part for each in slices for part in each.cut(_SEGMENT_NUMEL)]
        segments: list[DeltaSegment] = []
        parts: list[Encoded] = []
        room, compared = self.capacity_bytes, 0
        with closing(self._encoded(cut, base, snapshot, ready, taken)) as encoded:
            for each, part in encoded:
                if isinstance(part, TooDense):
                    return part
                room -= part.nbytes
                compared += each.box.numel
                if room < 0:
                    return TooDense(self.capacity_bytes, self.capacity_bytes - room, compared / self._elements)
                segments.append(DeltaSegment(each.tensor, each.box, part.nbytes))
                parts.append(part)
        nbytes, at = sum(part.nbytes for part in parts), 0
        memory = room_for(nbytes)[:nbytes]
        host = memory if memory.is_cpu else torch.empty(nbytes, dtype=torch.uint8)
        for part in parts:
            at += part.write_into(host[at:])
        if host is not memory:
            memory.copy_(host)
        return RankDelta(tuple(segments), sum(part.changed for part in parts), self._elements)

    def _encoded(
        self,
        slices: Sequence[SnapshotSlice],
        base: torch.Tensor,
        snapshot: torch.Tensor,
        ready: Callable[[int], None],
        taken: Callable[[], bool],
    ) -> Generator[tuple[SnapshotSlice, Encoded | TooDense], None, None]:
        """Every slice and its delta, in order; a few are encoded ahead of the consumer."""

        def one(each: SnapshotSlice) -> Encoded | TooDense:
            old, new = (each.view(memory).contiguous().view(-1) for memory in (base, snapshot))
            return encode(old, new, capacity_bytes=self.capacity_bytes)

        if snapshot.device.type != "cpu":
            for each in slices:
                ready(each.end)
                yield each, one(each)
            return
        if self._threads is None:
            self._threads = DaemonThreads(self._workers, "weightlane-encode")

        def once_ready() -> Iterator[SnapshotSlice]:
            for each in slices:
                ready(each.end)
                yield each

        def most() -> int:
            return _AHEAD * self._workers if taken() else max(1, self._workers - 1)

        # No thread may read the snapshots any more when this ends: the next one is taken in that memory.
        yield from self._threads.in_order(one, once_ready(), most)

    def close(self) -> None:
        """Let the threads end. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def sampled_changes(self, base: torch.Tensor, snapshot: torch.Tensor) -> tuple[int, int]:
        """Compare windows of two snapshots at even distances. Returns how many elements differ, of how many."""
        ends = list(accumulate(shard.numel for _, shard in self._shards))
        compared, differ = 0, []
        for number in range(_WINDOWS if ends else 0):
            first = (2 * number + 1) * self._elements // (2 * _WINDOWS)
            which = bisect_right(ends, first)
            place, shard = self._shards[which]
            width = shard.spec.dtype.itemsize
            start = place + (shard.numel - (ends[which] - first)) * width
            window = slice(start, start + min(_WINDOW_NUMEL, ends[which] - first) * width)
            old, new = (memory[window].view(INTEGERS[width]) for memory in (base, snapshot))
            differ.append(torch.count_nonzero(old != new))
            compared += new.numel()
        return int(torch.stack(differ).sum()) if differ else 0, compared


def delta_manifest(
    layout: Manifest, version: int, base: tuple[int, str], identity: str, segments: Sequence[Sequence[DeltaSegment]]
) -> Manifest:
    """The manifest of a delta to the version with number and identity `base`, of the segments of every rank in rank order."""
    nbytes = sum(segment.nbytes for mine in segments for segment in mine)
    bucket_bytes = max(_LEAST_BUCKET_BYTES, aligned(nbytes, _BUCKETS * ALIGNMENT_BYTES) // _BUCKETS)
    return replace(
        layout,
        version=version,
        bucket_bytes=min(bucket_bytes, layout.bucket_bytes),
        codec=CODEC_DELTA,
        base_version=base[0],
        base_identity=base[1],
        identity=identity,
        lasting=False,
        segments=tuple(segment for mine in segments for segment in mine),
    )


def delta_tables(segments: Sequence[Sequence[DeltaSegment]]) -> list[CopyTable]:
    """The copy table of every rank, whose segments lie back to back in the rank's memory and in the delta."""
    tables, offset = [], 0
    for mine in segments:
        nbytes = sum(segment.nbytes for segment in mine)
        tables.append(CopyTable.run(offset, nbytes))
        offset += nbytes
    return tables
