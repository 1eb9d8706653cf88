"""Pieces of the stream: equal runs of bytes at equal distances, which one call copies."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines.runtime.host_copies import copy_bytes


@dataclass(frozen=True, slots=True)
class StridedRun:
    """`count` rows of `nbytes` each, `step` bytes from one to the next, the first at byte `start`."""

    start: int
    step: int
    nbytes: int
    count: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + (self.count - 1) * self.step + self.nbytes

    def moved(self, nbytes: int) -> StridedRun:
        """The same, so many bytes further on."""
        return StridedRun(self.start + nbytes, self.step, self.nbytes, self.count)

    def part(self, row: int, count: int, skipped: int, nbytes: int) -> StridedRun:
        """`count` of the rows from number `row` on, of each `nbytes` from byte `skipped` on."""
        return StridedRun(self.start + row * self.step + skipped, self.step, nbytes, count)


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Bytes of the stream and where they lie in their owner's snapshot: as many rows of the same length."""

    stream: StridedRun
    snapshot: StridedRun

    @classmethod
    def run(cls, stream: int, snapshot: int, nbytes: int) -> StridedCopy:
        """One run."""
        return cls(StridedRun(stream, nbytes, nbytes, 1), StridedRun(snapshot, nbytes, nbytes, 1))

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return self.stream.nbytes * self.stream.count

    def within(self, start: int, stop: int) -> Iterator[StridedCopy]:
        """The part of it in the stream window [`start`, `stop`): whole rows, and what the window cuts of the first and last."""
        rows = self.stream
        step = max(rows.step, 1)
        row = max(0, (start - rows.start - rows.nbytes) // step + 1)
        last = min(rows.count - 1, (stop - 1 - rows.start) // step)
        while row <= last:
            at = rows.start + row * rows.step
            low, high = max(at, start), min(at + rows.nbytes, stop)
            if high - low == rows.nbytes:
                ends = rows.start + last * rows.step + rows.nbytes
                count = last - row + (1 if ends <= stop else 0)
            else:
                count = 1
            if low < high:
                yield StridedCopy(
                    *(side.part(row, count, low - at, high - low) for side in (self.stream, self.snapshot))
                )
            row += count


@dataclass(frozen=True, slots=True)
class PackedCopy:
    """Where a piece of a window lies."""

    stream: StridedRun
    snapshot: StridedRun
    packed: StridedRun
    """When a window's pieces lie back to back."""


@dataclass(frozen=True, slots=True)
class BucketCopies:
    """A rank's pieces in one window of the stream."""

    strips: Sequence[PackedCopy]
    nbytes: int
    snapshot_end: int
    """One past the last byte of the snapshot that is needed."""
    unbroken: bool
    """Whether they lie back to back in the snapshot, too."""
    shift: int | None
    """How much further on in the snapshot than in the stream all of it lies; None where that is not one number."""

    @classmethod
    def of(cls, pieces: Iterable[StridedCopy]) -> BucketCopies:
        """As few strips as neighbours allow."""
        strips: list[PackedCopy] = []
        nbytes = 0
        for piece in _in_strips(_joined(pieces)):
            each, count = piece.stream.nbytes, piece.stream.count
            strips.append(PackedCopy(piece.stream, piece.snapshot, StridedRun(nbytes, each, each, count)))
            nbytes += each * count
        whole = all(_is_run(strip.snapshot) for strip in strips)
        starts = [strip.snapshot.start for strip in strips[1:]]
        unbroken = whole and all(strip.snapshot.end == start for strip, start in zip(strips, starts, strict=False))
        shifts = {strip.snapshot.start - strip.stream.start for strip in strips}
        alike = len(shifts) == 1 and all(strip.snapshot.step == strip.stream.step for strip in strips)
        end = max((strip.snapshot.end for strip in strips), default=0)
        return cls(strips, nbytes, end, unbroken, shifts.pop() if alike else None)


def copy_strided(target: torch.Tensor, to: StridedRun, source: torch.Tensor, come: StridedRun) -> None:
    """Copy rows of `source` over as many of `target`, both 1-D uint8."""
    if to.count == 1:
        copy_bytes(target[to.start : to.start + to.nbytes], source[come.start : come.start + come.nbytes])
        return
    into, out = (
        flat.as_strided((rows.count, rows.nbytes), (rows.step, 1), flat.storage_offset() + rows.start)
        for flat, rows in ((target, to), (source, come))
    )
    into.copy_(out)


def _is_run(rows: StridedRun) -> bool:
    return rows.count == 1 or rows.step == rows.nbytes


def _in_strips(pieces: Iterable[StridedCopy]) -> Iterator[StridedCopy]:
    """Runs of one length at equal distances, on both sides, as one."""
    group: list[StridedCopy] = []
    for piece in pieces:
        if group and not _goes_on(group, piece):
            yield _one(group)
            group = []
        group.append(piece)
    if group:
        yield _one(group)


def _goes_on(group: Sequence[StridedCopy], piece: StridedCopy) -> bool:
    """Whether `piece` can be the next row of `group`, whose rows may not lie over each other, nor go backwards."""
    last = group[-1]
    steps = piece.stream.start - last.stream.start, piece.snapshot.start - last.snapshot.start
    if piece.stream.count > 1 or last.stream.count > 1 or piece.stream.nbytes != last.stream.nbytes:
        return False
    if min(steps) < piece.stream.nbytes:
        return False
    first = group[0]
    return len(group) == 1 or steps == (
        group[1].stream.start - first.stream.start,
        group[1].snapshot.start - first.snapshot.start,
    )


def _one(group: Sequence[StridedCopy]) -> StridedCopy:
    first, count = group[0], len(group)
    if count == 1:
        return first
    return StridedCopy(
        *(
            StridedRun(one.start, two.start - one.start, one.nbytes, count)
            for one, two in ((first.stream, group[1].stream), (first.snapshot, group[1].snapshot))
        )
    )


def _joined(pieces: Iterable[StridedCopy]) -> Iterator[StridedCopy]:
    """Runs that go on where the one before ends, on both sides, as one."""
    last: StridedCopy | None = None
    for piece in pieces:
        if last is not None and _adjoin(last, piece):
            last = StridedCopy.run(last.stream.start, last.snapshot.start, last.nbytes + piece.nbytes)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _adjoin(last: StridedCopy, piece: StridedCopy) -> bool:
    return (
        last.stream.count == piece.stream.count == 1
        and last.stream.end == piece.stream.start
        and last.snapshot.end == piece.snapshot.start
    )
