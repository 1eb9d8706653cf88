"""The changes of one frame, in the form that the encoder needs: counts, positions, and values."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from . import compare
from .raw import Bytes, Positions, Words, unsigned
from .wire_format import BLOCK, FRAME, Counts, Run, is_heavy, lengths_of_blocks

_COUNT_BLOCKS_FROM = 0.3
"""Share of changed 8-element words from which blocks are counted before positions are listed, because heavy blocks need none."""


class _Scratch(threading.local):
    """One mask per thread. It is kept because fresh memory costs more than the comparison."""

    @cached_property
    def mask(self) -> compare.Mask:
        return np.empty(FRAME, np.bool_)


_SCRATCH = _Scratch()


@dataclass(frozen=True, slots=True)
class FrameChanges:
    """The changes of a frame. Valid until the next frame of the same thread is compared."""

    counts: Counts
    """Changed elements of each block."""
    positions: Positions
    """Positions of the changed elements, ascending. Heavy blocks may be left out."""
    words: Words
    """The frame's new elements; those that have not changed may be anything."""
    mask: compare.Mask
    """For each element of a heavy block whether it has changed."""

    def sparse(self, runs: list[Run]) -> Positions:
        """Positions of the changes in `runs`, which are not heavy."""
        if len(runs) == 1 and not runs[0].start and runs[0].stop == self.words.size:
            return self.positions
        edges = np.array([[run.start, run.stop] for run in runs]).ravel()
        cuts = np.searchsorted(self.positions, edges).tolist()
        parts = [self.positions[start:stop] for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def bitmap(self, runs: list[Run]) -> tuple[Bytes, Words]:
        """Bitmap and changed elements of `runs`, which are heavy."""
        masks = [self.mask[run.start : run.stop] for run in runs]
        # Not words[mask]: that branches on every element, which costs nine times as much.
        values = [
            self.words[run.start : run.stop].take(mask.nonzero()[0]) for run, mask in zip(runs, masks, strict=True)
        ]
        bits = [np.packbits(mask, bitorder="little") for mask in masks]
        return np.concatenate(bits), np.concatenate(values)


@dataclass(frozen=True, slots=True)
class HostChanges:
    """The changes of a segment that lies in host memory, found frame by frame."""

    old: Words
    new: Words

    def frame(self, start: int, stop: int) -> FrameChanges | None:
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
            return FrameChanges(_counts_of(positions, lengths.size), positions, new, mask)
        counts = np.array([np.count_nonzero(mask[first : first + BLOCK]) for first in range(0, size, BLOCK)])
        heavy = is_heavy(counts, lengths)
        light = mask
        if heavy.any():  # listing the positions of heavy blocks would take most of the time
            light = mask.copy()
            for block in heavy.nonzero()[0].tolist():
                light[block * BLOCK : (block + 1) * BLOCK] = False
        return FrameChanges(counts, compare.positions_in(light), new, mask)


@dataclass(frozen=True, slots=True)
class DeviceChanges:
    """The changes of a segment that lies on a device, which found them."""

    positions: Positions
    """Positions of the changed elements in the segment, ascending; on CPU."""
    values: Words
    """The new elements there; on CPU."""

    def frame(self, start: int, stop: int) -> FrameChanges | None:
        """The changes in elements [`start`, `stop`); None if there are none."""
        low, high = np.searchsorted(self.positions, (start, stop)).tolist()
        if low == high:
            return None
        positions = self.positions[low:high] - start
        size = stop - start
        counts = _counts_of(positions, -(-size // BLOCK))
        mask = _SCRATCH.mask[:size]
        mask.fill(False)
        mask[positions] = True
        words = np.zeros(size, unsigned(self.values.itemsize))
        words[positions] = self.values[low:high]
        return FrameChanges(counts, positions, words, mask)


def _counts_of(positions: Positions, blocks: int) -> Counts:
    edges = np.searchsorted(positions, np.arange(0, (blocks + 1) * BLOCK, BLOCK))
    return np.diff(edges)
