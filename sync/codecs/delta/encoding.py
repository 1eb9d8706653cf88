"""The sender's side of a delta: what changed in a rank's snapshot since the version that the receivers have."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from weightlane.ckpt_engines import ProtocolError
from weightlane.ckpt_engines.runtime.daemon_threads import DaemonThreads
from weightlane.ckpt_engines.runtime.devices import usable_cpus

from ...version.manifest import ALIGNMENT_BYTES, CODEC_DELTA, DeltaSegment, Manifest, PlainSegment
from ...version.packing import CopyTable
from ...version.stream_parts import SnapshotPart
from ...version.strided_copy import StridedCopy
from ...version.tensor_spec import Held, HeldSlice, LocalShard
from .format import Encoded, TooDense, encode

_PART = "delta"
_RUNS, _RUN_NUMEL = 4096, 32
_FEW_NUMEL = 1024
_LOOKED_AT = 128
"""How much is looked at to tell about how much has changed: so many runs of so many elements, so many elements of a shard that
is shorter than runs are apart, and about so many shards."""
_PIECE_NUMEL = 1 << 23
"""Elements of a segment at most, so that large tensors are encoded by several threads, and decoded as they arrive."""
_MOST_THREADS = 4
"""That encode. Comparing is limited by memory, which few threads saturate, and the trainer has work of its own."""
_LOOK_S = 0.002
"""Between two looks whether the snapshot has been taken."""
_AHEAD = 2
"""Pieces per thread that are encoded before the ones in front are taken."""
_BUCKETS = 16
_LEAST_BUCKET_BYTES = 512 << 10
"""A delta is cut into so many buckets, unless they would be smaller than this."""
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SEGMENTS: TypeAdapter[list[tuple[int, list[int], list[int], int]]] = TypeAdapter(list[PlainSegment])


@dataclass(frozen=True, slots=True)
class RankDelta:
    """What one rank has to send of a delta."""

    segments: tuple[DeltaSegment, ...]
    parts: tuple[Encoded, ...]
    """The segments' bytes, in their order, until they were written somewhere."""
    changed: int
    """Elements whose bits differ."""
    elements: int

    @property
    def nbytes(self) -> int:
        """Of all segments."""
        return sum(segment.nbytes for segment in self.segments)

    @property
    def density(self) -> float:
        """Share of elements that changed."""
        return self.changed / self.elements if self.elements else 0.0

    def write_into(self, memory: torch.Tensor) -> None:
        """Write the segments back to back into `memory`, 1-D uint8, `nbytes` long."""
        onto = memory if memory.is_cpu else torch.empty(memory.numel(), dtype=torch.uint8)
        at = 0
        for part in self.parts:
            at += part.write_into(onto[at:])
        if onto is not memory:
            memory.copy_(onto)


class DeltaEncoder:
    """Compares two snapshots of a rank's shards, on CPU with several threads.

    Args:
        shards: What the rank holds.
        places: First byte of each in a snapshot.
    """

    def __init__(self, shards: Sequence[Held], places: Sequence[int]) -> None:
        self._shards = [
            (place, shard)
            for place, shard in sorted(zip(places, shards, strict=True), key=lambda placed: placed[0])
            if shard.numel
        ]
        self._elements = sum(shard.numel for shard in shards)
        self.dense_bytes = sum(shard.nbytes for shard in shards)
        """Bytes of all shards."""
        self._workers = min(_MOST_THREADS, usable_cpus())
        self._threads: DaemonThreads | None = None
        """There from the first delta on: its threads keep memory for what they compare."""

    def encode(
        self,
        parts: Sequence[SnapshotPart],
        base: torch.Tensor,
        snapshot: torch.Tensor,
        capacity_bytes: int,
        ready: Callable[[int], None],
        taken: Callable[[], bool] = lambda: True,
    ) -> RankDelta | TooDense:
        """What turns the snapshot `base` into `snapshot`, both 1-D uint8, in at most `capacity_bytes`.

        `parts` are those of the stream that this rank sends, in the stream's order.

        ``ready(n)`` returns once the snapshot's first `n` bytes are there: it may be encoded while it is being taken. Until
        ``taken()`` one core is left to that, for which the optimizer waits.
        """
        pieces = [piece for part in parts for piece in part.cut(_PIECE_NUMEL)]
        segments: list[DeltaSegment] = []
        encoded_parts: list[Encoded] = []
        room, compared = capacity_bytes, 0
        with closing(self._encoded(pieces, base, snapshot, capacity_bytes, ready, taken)) as encoded:
            for piece, part in encoded:
                if isinstance(part, TooDense):
                    return part
                room -= part.nbytes
                compared += piece.box.numel
                if room < 0:
                    return TooDense(capacity_bytes, capacity_bytes - room, compared / self._elements)
                segments.append(DeltaSegment(piece.number, piece.box, part.nbytes))
                encoded_parts.append(part)
        changed = sum(part.changed for part in encoded_parts)
        return RankDelta(tuple(segments), tuple(encoded_parts), changed, self._elements)

    def _encoded(
        self,
        pieces: Sequence[SnapshotPart],
        base: torch.Tensor,
        snapshot: torch.Tensor,
        capacity_bytes: int,
        ready: Callable[[int], None],
        taken: Callable[[], bool],
    ) -> Generator[tuple[SnapshotPart, Encoded | TooDense], None, None]:
        """Every piece and its delta, in order; a few are encoded ahead of who asks."""

        def one(piece: SnapshotPart) -> Encoded | TooDense:
            old, new = (piece.view(memory).contiguous().view(-1) for memory in (base, snapshot))
            return encode(old, new, capacity_bytes=capacity_bytes)

        if snapshot.device.type != "cpu":
            for piece in pieces:
                ready(piece.end)
                yield piece, one(piece)
            return
        if self._threads is None:
            self._threads = DaemonThreads(self._workers, "weightlane-encode")
        begun: deque[tuple[SnapshotPart, Future[Encoded | TooDense]]] = deque()
        try:
            for piece in pieces:
                ready(piece.end)
                self._leave_a_core([part for _, part in begun], taken)
                begun.append((piece, self._threads.submit(one, piece)))
                while begun and (len(begun) > _AHEAD * self._workers or begun[0][1].done()):
                    first, part = begun.popleft()
                    yield first, part.result()
            while begun:
                first, part = begun.popleft()
                yield first, part.result()
        finally:
            # Nobody may look at the snapshots any more when this returns: the next one is taken in that memory.
            for _, part in begun:
                part.cancel()
            wait([part for _, part in begun])

    def _leave_a_core(self, begun: Sequence[Future[Encoded | TooDense]], taken: Callable[[], bool]) -> None:
        """Return once another piece may be encoded: by all threads but one while the snapshot is being taken."""
        while not taken():
            running = [part for part in begun if not part.done()]
            if len(running) < max(1, self._workers - 1):
                return
            wait(running, _LOOK_S, FIRST_COMPLETED)

    def close(self) -> None:
        """Let the threads end. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    @torch.no_grad()
    def sampled_density(self, base: torch.Tensor) -> float:
        """About which share of the elements differs between the live shards and the snapshot `base`.

        Looks at short runs all over them: reading from memory costs the same for one element as for a run. Where there are many
        shards, one of several small neighbours speaks for all of them.
        """
        changed = spoken_for = 0.0
        step = max(_RUN_NUMEL, self._elements // _RUNS)
        for number, (place, shard) in enumerate(self._shards, start=1):
            spoken_for += shard.numel
            if spoken_for * _LOOKED_AT < self._elements and number < len(self._shards):
                continue
            old = base[place : place + shard.nbytes].view(shard.spec.dtype)
            if isinstance(shard, LocalShard):
                changed += spoken_for * _sampled(old, shard.data.detach().reshape(-1), step)
            elif isinstance(shard, HeldSlice) and shard.differing is not None:
                changed += spoken_for * shard.differing(old)
            else:
                continue
            spoken_for = 0.0
        return changed / self._elements if self._elements else 0.0


def _sampled(old: torch.Tensor, live: torch.Tensor, step: int) -> float:
    """The share of elements that differ in runs that begin every `step` elements; in the first of them if there are fewer."""
    runs, run = divmod(old.numel(), step)
    runs, run = (runs, _RUN_NUMEL) if runs else (1, min(run, _FEW_NUMEL))
    apart = step if runs > 1 else run
    old, live = (every.as_strided((runs, run), (apart, 1)) for every in (old, live))
    integers = _INTEGERS[old.dtype.itemsize]
    differ = live.to(old.device, old.dtype).contiguous().view(integers) != old.contiguous().view(integers)
    return int(torch.count_nonzero(differ)) / differ.numel()


def delta_manifest(
    layout: Manifest, version: int, base: tuple[int, str], identity: str, segments: Sequence[Sequence[DeltaSegment]]
) -> Manifest:
    """The manifest of a delta to which every rank contributes `segments`, in rank order.

    It is cut into smaller buckets than full versions, so that there is something to decode while the rest is on its way.

    Args:
        layout: That of dense versions.
        version: What it is a delta to.
        base: Version and identity of what it applies to.
        identity: Of the version itself.
        segments: By rank.
    """
    nbytes = sum(segment.nbytes for mine in segments for segment in mine)
    bucket_bytes = max(_LEAST_BUCKET_BYTES, -(-nbytes // _BUCKETS // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
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
    """Where each rank's segments, which lie back to back in its memory, belong on the wire; by rank."""
    tables, offset = [], 0
    for mine in segments:
        nbytes = sum(segment.nbytes for segment in mine)
        tables.append(CopyTable([StridedCopy.run(offset, 0, nbytes)] if nbytes else []))
        offset += nbytes
    return tables


def segments_to_plain(segments: Sequence[DeltaSegment]) -> list[list[int]]:
    """As JSON."""
    return [segment.to_plain() for segment in segments]


def segments_from_plain(plain: Any) -> tuple[DeltaSegment, ...]:
    """Parse another rank's segments; `ProtocolError` for anything else."""
    try:
        return tuple(map(DeltaSegment.from_plain, _SEGMENTS.validate_python(plain)))
    except ValidationError as error:
        raise ProtocolError(f"not a list of segments: {error.errors()[0]['msg']}.", part=_PART) from None
