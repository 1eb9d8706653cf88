"""The changes of one frame, in the form that the encoder needs: counts, positions, and values."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from . import compare
from .raw import Bytes, Positions, Words
from .wire_format import BLOCK, FRAME, Counts, Run, is_heavy, lengths_of_blocks

_COUNT_BLOCKS_FROM = 0.3
"""Share of changed 8-element words from which blocks are counted before positions are listed, because heavy blocks need none."""


class _Scratch(threading.local):
    """One mask per thread. It is kept because fresh memory costs more than the comparison."""

    @cached_property
    def mask(self) -> compare.Mask:
        return np.empty(FRAME, np.bool_)


_SCRATCH = _Scratch()


class FrameChanges(Protocol):
    """The changes of a frame. Valid until the next frame of the same thread is compared."""

    @property
    def counts(self) -> Counts:
        """Changed elements of each block."""

    def sparse(self, runs: list[Run]) -> tuple[Positions, Words]:
        """Positions of the changes in `runs`, which are not heavy, and the new elements there."""

    def bitmap(self, runs: list[Run]) -> tuple[Bytes, Words]:
        """Bitmap and changed elements of `runs`, which are heavy."""


@dataclass(frozen=True, slots=True)
class HostFrame:
    """The changes of a frame in host memory. See `FrameChanges`."""

    counts: Counts
    positions: Positions
    """Positions of the changed elements, ascending. Heavy blocks may be left out."""
    words: Words
    """The frame's new elements."""
    mask: compare.Mask
    """For each element of a heavy block whether it has changed."""

    def sparse(self, runs: list[Run]) -> tuple[Positions, Words]:
        """See `FrameChanges`."""
        if len(runs) == 1 and not runs[0].start and runs[0].stop == self.words.size:
            positions = self.positions
        else:
            positions = _joined([self.positions[part] for part in _parts(self.positions, runs)])
        return positions, self.words.take(positions)

    def bitmap(self, runs: list[Run]) -> tuple[Bytes, Words]:
        """See `FrameChanges`."""
        masks = [self.mask[run.start : run.stop] for run in runs]
        # Not words[mask]: that branches on every element, which costs nine times as much.
        values = [
            self.words[run.start : run.stop].take(mask.nonzero()[0]) for run, mask in zip(runs, masks, strict=True)
        ]
        bits = [np.packbits(mask, bitorder="little") for mask in masks]
        return np.concatenate(bits), np.concatenate(values)


@dataclass(frozen=True, slots=True)
class DeviceFrame:
    """The changes of a frame that a device has found. Touches nothing that has not changed. See `FrameChanges`."""

    counts: Counts
    positions: Positions
    """Positions of all changed elements, ascending."""
    values: Words
    """The new elements there."""

    def sparse(self, runs: list[Run]) -> tuple[Positions, Words]:
        """See `FrameChanges`."""
        parts = _parts(self.positions, runs)
        return _joined([self.positions[part] for part in parts]), _joined([self.values[part] for part in parts])

    def bitmap(self, runs: list[Run]) -> tuple[Bytes, Words]:
        """See `FrameChanges`."""
        bits, parts = [], _parts(self.positions, runs)
        for run, part in zip(runs, parts, strict=True):
            mask = np.zeros(run.stop - run.start, np.bool_)
            mask[self.positions[part] - run.start] = True
            bits.append(np.packbits(mask, bitorder="little"))
        return np.concatenate(bits), _joined([self.values[part] for part in parts])


@dataclass(frozen=True, slots=True)
class HostChanges:
    """The changes of a segment that lies in host memory, found frame by frame."""

    old: Words
    new: Words

    def frame(self, start: int, stop: int) -> HostFrame | None:
        """The changes in elements [`start`, `stop`); None if there are none."""
        old, new = self.old[start:stop], self.new[start:stop]
        size = new.size
        mask = _SCRATCH.mask[: -(-size // 64) * 64]
        np.not_equal(old, new, out=mask[:size])
        mask[size:] = False
        words = compare.changed_words(mask)
        changed = np.count_nonzero(words)
        if not changed:
            return None
        lengths = lengths_of_blocks(size)
        if changed <= _COUNT_BLOCKS_FROM * words.size:
            positions = compare.positions_in(mask, words)
            return HostFrame(_counts_of(positions, lengths.size), positions, new, mask)
        counts = np.array([np.count_nonzero(mask[first : first + BLOCK]) for first in range(0, size, BLOCK)])
        heavy = is_heavy(counts, lengths)
        light = mask
        if heavy.any():  # listing the positions of heavy blocks would take most of the time
            light = mask.copy()
            for block in heavy.nonzero()[0].tolist():
                light[block * BLOCK : (block + 1) * BLOCK] = False
        return HostFrame(counts, compare.positions_in(light), new, mask)


@dataclass(frozen=True, slots=True)
class DeviceChanges:
    """The changes of a segment that lies on a device, which found them."""

    positions: Positions
    """Positions of the changed elements in the segment, ascending; on CPU."""
    values: Words
    """The new elements there; on CPU."""

    def frame(self, start: int, stop: int) -> DeviceFrame | None:
        """The changes in elements [`start`, `stop`); None if there are none."""
        low, high = np.searchsorted(self.positions, (start, stop)).tolist()
        if low == high:
            return None
        positions = self.positions[low:high] - start
        return DeviceFrame(_counts_of(positions, -(-(stop - start) // BLOCK)), positions, self.values[low:high])


def _parts(positions: Positions, runs: list[Run]) -> list[slice]:
    """Where the positions of each run lie among `positions`."""
    edges = np.array([[run.start, run.stop] for run in runs]).ravel()
    cuts = np.searchsorted(positions, edges).tolist()
    return [slice(start, stop) for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]


def _joined(parts: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _counts_of(positions: Positions, blocks: int) -> Counts:
    edges = np.searchsorted(positions, np.arange(0, (blocks + 1) * BLOCK, BLOCK))
    return np.diff(edges)
