"""Runs of bytes, and strips of them: equal runs at equal distances, which one call copies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from .host_memory import copy_bytes


@dataclass(frozen=True, slots=True)
class Run:
    """A contiguous piece of the stream and where it lies in its owner's snapshot (all in bytes)."""

    stream: int
    snapshot: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Rows:
    """`count` rows of `nbytes` each, `step` bytes from one to the next, the first at byte `start`."""

    start: int
    step: int
    nbytes: int
    count: int

    def moved(self, nbytes: int) -> Rows:
        """The same, so many bytes further on."""
        return Rows(self.start + nbytes, self.step, self.nbytes, self.count)


@dataclass(frozen=True, slots=True)
class Strip:
    """Where some runs lie."""

    stream: Rows
    snapshot: Rows
    packed: Rows
    """When a window's runs lie back to back."""


@dataclass(frozen=True, slots=True)
class Window:
    """A rank's runs in one window of the stream."""

    strips: Sequence[Strip]
    nbytes: int
    snapshot_end: int
    """One past the last byte of the snapshot that is needed."""
    unbroken: bool
    """Whether they lie back to back in the snapshot, too."""

    @classmethod
    def of(cls, runs: Iterable[Run]) -> Window:
        """As few strips as neighbours allow; `runs` ascend in the stream."""
        strips: list[Strip] = []
        nbytes = end = 0
        unbroken = True
        rows: list[Run] = []
        for run in _joined(runs):
            unbroken &= end in (0, run.snapshot)
            end = max(end, run.snapshot + run.nbytes)
            if rows and not _goes_on(rows, run):
                strips.append(_strip(rows, nbytes))
                nbytes += len(rows) * rows[0].nbytes
                rows = []
            rows.append(run)
        if rows:
            strips.append(_strip(rows, nbytes))
            nbytes += len(rows) * rows[0].nbytes
        return cls(strips, nbytes, end, unbroken)


def copy_rows(target: torch.Tensor, to: Rows, source: torch.Tensor, come: Rows) -> None:
    """Copy rows of `source` over as many of `target`, both 1-D uint8."""
    if to.count == 1:
        copy_bytes(target[to.start : to.start + to.nbytes], source[come.start : come.start + come.nbytes])
        return
    into, out = (
        flat.as_strided((rows.count, rows.nbytes), (rows.step, 1), flat.storage_offset() + rows.start)
        for flat, rows in ((target, to), (source, come))
    )
    into.copy_(out)


def _goes_on(rows: Sequence[Run], run: Run) -> bool:
    """Whether `run` can be the next of `rows`, which may not lie over each other, nor go backwards."""
    steps = run.stream - rows[-1].stream, run.snapshot - rows[-1].snapshot
    if run.nbytes != rows[0].nbytes or min(steps) < run.nbytes:
        return False
    return len(rows) == 1 or steps == (rows[1].stream - rows[0].stream, rows[1].snapshot - rows[0].snapshot)


def _strip(rows: Sequence[Run], packed: int) -> Strip:
    first, second, count = rows[0], rows[min(1, len(rows) - 1)], len(rows)
    return Strip(
        Rows(first.stream, second.stream - first.stream, first.nbytes, count),
        Rows(first.snapshot, second.snapshot - first.snapshot, first.nbytes, count),
        Rows(packed, first.nbytes, first.nbytes, count),
    )


def _joined(runs: Iterable[Run]) -> Iterable[Run]:
    """Those that go on where the one before ends, on both sides, as one."""
    last: Run | None = None
    for run in runs:
        if last is None:
            last = run
        elif (last.stream + last.nbytes, last.snapshot + last.nbytes) == (run.stream, run.snapshot):
            last = Run(last.stream, last.snapshot, last.nbytes + run.nbytes)
        else:
            yield last
            last = run
    if last is not None:
        yield last
