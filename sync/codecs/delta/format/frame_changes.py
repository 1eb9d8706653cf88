"""What has changed in one frame, in the form that the encoder needs it: counts, positions, and values."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from . import compare
from .raw import Bytes, Positions, Words, integer_view, unsigned
from .wire_format import BLOCK, FRAME, Counts, Run, is_heavy, lengths_of_blocks

_COUNT_BLOCKS_FROM = 0.3
"""Share of changed 8-element words from which blocks are counted before positions are listed: some may need none."""


class _Scratch(threading.local):
    """One mask per thread, kept, because fresh memory costs more than the comparison."""

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
    """Of the changed elements of all blocks that are not heavy (and perhaps of others), ascending."""
    words: Words
    """The frame's new elements."""
    mask: compare.Mask
    """For each element of a heavy block whether it has changed."""

    def sparse(self, runs: list[Run]) -> Positions:
        """Positions of the changes in `runs`, which are not heavy."""
        if len(runs) == 1 and not runs[0].start and runs[0].stop == self.words.size:
            return self.positions
        edges = np.array([[run.start, run.stop] for run in runs]).ravel()
        cuts = np.searchsorted(self.positions, edges).tolist()
        pieces = [self.positions[start:stop] for start, stop in zip(cuts[::2], cuts[1::2], strict=True)]
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def values(self, positions: Positions) -> Words:
        """New elements at `positions`."""
        return self.words.take(positions)

    def bitmap(self, runs: list[Run]) -> tuple[Bytes, Words]:
        """Bitmap and changed elements of `runs`, which are heavy."""
        masks = [self.mask[run.start : run.stop] for run in runs]
        # Not words[mask]: that branches on every element, which costs nine times as much.
        values = [
            self.words[run.start : run.stop].take(mask.nonzero()[0]) for run, mask in zip(runs, masks, strict=True)
        ]
        bits = [np.packbits(mask, bitorder="little") for mask in masks]
        return np.concatenate(bits), np.concatenate(values)

    def dense(self, runs: list[Run]) -> Words:
        """All elements of `runs`."""
        return np.concatenate([self.words[run.start : run.stop] for run in runs])


def compare_frame(old: Words, new: Words) -> FrameChanges | None:
    """The changes between two frames on CPU; None if there are none."""
    size = new.size
    padded = -(-size // 64) * 64
    mask = _SCRATCH.mask[:padded]
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
    starts = range(0, size, BLOCK)
    counts = np.array([np.count_nonzero(mask[start : start + BLOCK]) for start in starts])
    heavy = is_heavy(counts, lengths)
    if heavy.all():
        return FrameChanges(counts, np.empty(0, np.int64), new, mask)
    if not heavy.any():
        return FrameChanges(counts, compare.positions_in(mask, words), new, mask)
    # The heavy blocks would dominate: list the others' positions with their entries taken out.
    others = mask.copy()
    for block in heavy.nonzero()[0].tolist():
        others[block * BLOCK : (block + 1) * BLOCK] = False
    return FrameChanges(counts, compare.positions_in(others), new, mask)


@dataclass(frozen=True, slots=True)
class DeviceChanges:
    """All changed positions and elements of a segment that lies on a device."""

    positions: Positions
    """Ascending, in the segment; on CPU."""
    values: Words
    """The new elements there; on CPU."""
    new: torch.Tensor

    def frame(self, start: int, stop: int) -> FrameChanges | None:
        """The part in elements [`start`, `stop`)."""
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
        for block in is_heavy(counts, lengths_of_blocks(size)).nonzero()[0].tolist():
            here = slice(block * BLOCK, min((block + 1) * BLOCK, size))
            piece = integer_view(self.new)[start + here.start : start + here.stop].cpu()
            words[here] = piece.numpy().view(words.dtype)
        return FrameChanges(counts, positions, words, mask)


def _counts_of(positions: Positions, blocks: int) -> Counts:
    edges = np.searchsorted(positions, np.arange(0, (blocks + 1) * BLOCK, BLOCK))
    return np.diff(edges)
