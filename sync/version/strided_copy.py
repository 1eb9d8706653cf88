"""Strided copies between a snapshot and the stream: one call copies rows of equal length at equal distances."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines.runtime.host_copies import copy_bytes


@dataclass(frozen=True, slots=True)
class StridedRows:
    """`count` rows of `nbytes` each, `step` bytes from one to the next, the first at byte `start`."""

    start: int
    step: int
    nbytes: int
    count: int

    @property
    def end(self) -> int:
        """One past the last byte."""
        return self.start + (self.count - 1) * self.step + self.nbytes

    @property
    def is_contiguous(self) -> bool:
        """Whether there is no gap between rows."""
        return self.count == 1 or self.step == self.nbytes

    def moved(self, nbytes: int) -> StridedRows:
        """The same rows, with `nbytes` added to their start."""
        return StridedRows(self.start + nbytes, self.step, self.nbytes, self.count)

    def part(self, row: int, count: int, skipped: int, nbytes: int) -> StridedRows:
        """The part with `count` rows from row `row` on, and of each row `nbytes` bytes from byte `skipped` on."""
        return StridedRows(self.start + row * self.step + skipped, self.step, nbytes, count)


@dataclass(frozen=True, slots=True)
class StridedCopy:
    """Rows of the stream, and the same rows in a rank's snapshot."""

    stream: StridedRows
    snapshot: StridedRows

    @classmethod
    def run(cls, stream: int, snapshot: int, nbytes: int) -> StridedCopy:
        """A copy of one row."""
        return cls(StridedRows(stream, nbytes, nbytes, 1), StridedRows(snapshot, nbytes, nbytes, 1))

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self.stream.nbytes * self.stream.count

    def within(self, start: int, stop: int) -> Iterator[StridedCopy]:
        """The part in the stream window [`start`, `stop`): complete rows, and the parts of the first and last row."""
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

    def can_follow(self, copies: Sequence[StridedCopy]) -> bool:
        """Whether this row continues the rows `copies` at the same distance; rows may neither overlap nor go backwards."""
        first, last = copies[0], copies[-1]
        if self.stream.count > 1 or last.stream.count > 1 or self.stream.nbytes != last.stream.nbytes:
            return False
        steps = _steps(last, self)
        return min(steps) >= self.stream.nbytes and (len(copies) == 1 or steps == _steps(first, copies[1]))


@dataclass(frozen=True, slots=True)
class PackedCopy:
    """A `StridedCopy`, and the places of its rows in a buffer that has all rows of a window back to back."""

    stream: StridedRows
    snapshot: StridedRows
    packed: StridedRows


@dataclass(frozen=True, slots=True)
class BucketCopies:
    """A rank's bytes in one window of the stream, in as few copies as possible."""

    copies: Sequence[PackedCopy]
    nbytes: int
    snapshot_end: int
    """One past the last byte of the snapshot that is needed."""
    unbroken: bool
    """Whether the bytes lie back to back in the snapshot, too."""
    shift: int | None
    """Offset in the snapshot minus offset in the stream, in bytes; None if it differs between the copies."""

    @classmethod
    def of(cls, copies: Iterable[StridedCopy]) -> BucketCopies:
        """Merge copies that follow each other."""
        merged: list[PackedCopy] = []
        nbytes = 0
        for copy in _equal_rows_merged(_adjoining_merged(copies)):
            each, count = copy.stream.nbytes, copy.stream.count
            merged.append(PackedCopy(copy.stream, copy.snapshot, StridedRows(nbytes, each, each, count)))
            nbytes += each * count
        contiguous = all(copy.snapshot.is_contiguous for copy in merged)
        starts = [copy.snapshot.start for copy in merged[1:]]
        unbroken = contiguous and all(copy.snapshot.end == start for copy, start in zip(merged, starts, strict=False))
        shifts = {copy.snapshot.start - copy.stream.start for copy in merged}
        parallel = len(shifts) == 1 and all(copy.snapshot.step == copy.stream.step for copy in merged)
        end = max((copy.snapshot.end for copy in merged), default=0)
        return cls(merged, nbytes, end, unbroken, shifts.pop() if parallel else None)


def copy_strided(target: torch.Tensor, to: StridedRows, source: torch.Tensor, rows: StridedRows) -> None:
    """Copy `rows` of `source` to the rows `to` of `target`, both 1-D uint8."""
    if to.count == 1:
        copy_bytes(target[to.start : to.start + to.nbytes], source[rows.start : rows.start + rows.nbytes])
        return
    into, out = (
        flat.as_strided((side.count, side.nbytes), (side.step, 1), flat.storage_offset() + side.start)
        for flat, side in ((target, to), (source, rows))
    )
    into.copy_(out)


def _steps(one: StridedCopy, other: StridedCopy) -> tuple[int, int]:
    return other.stream.start - one.stream.start, other.snapshot.start - one.snapshot.start


def _equal_rows_merged(copies: Iterable[StridedCopy]) -> Iterator[StridedCopy]:
    """Merge rows of equal length at equal distances, if the distances are equal on both sides."""
    group: list[StridedCopy] = []
    for copy in copies:
        if group and not copy.can_follow(group):
            yield _merged(group)
            group = []
        group.append(copy)
    if group:
        yield _merged(group)


def _merged(group: Sequence[StridedCopy]) -> StridedCopy:
    first, count = group[0], len(group)
    if count == 1:
        return first
    sides = zip((first.stream, first.snapshot), _steps(first, group[1]), strict=True)
    return StridedCopy(*(StridedRows(side.start, step, side.nbytes, count) for side, step in sides))


def _adjoining_merged(copies: Iterable[StridedCopy]) -> Iterator[StridedCopy]:
    """Merge rows that begin where the row before ends, on both sides."""
    last: StridedCopy | None = None
    for copy in copies:
        if last is not None and _adjoin(last, copy):
            last = StridedCopy.run(last.stream.start, last.snapshot.start, last.nbytes + copy.nbytes)
            continue
        if last is not None:
            yield last
        last = copy
    if last is not None:
        yield last


def _adjoin(last: StridedCopy, copy: StridedCopy) -> bool:
    return (
        last.stream.count == copy.stream.count == 1
        and last.stream.end == copy.stream.start
        and last.snapshot.end == copy.snapshot.start
    )
