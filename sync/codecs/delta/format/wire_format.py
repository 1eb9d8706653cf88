"""The wire format of a delta: frames and blocks of a segment, the encoding of each block, and the headers.

A *segment* is a run of elements of one size, for example a rank's shard of one tensor. It is cut into *frames* of 2**21 elements,
and frames into *blocks* of 2**16. Positions are relative to the frame. All numbers are little-endian. Every item starts at a
multiple of 8 bytes; the gaps are zeros:

    segment = header (32 bytes: magic, format, element size, log2 of elements per block, log2 of blocks per frame,
                      elements u64, changed elements u64, length of all of it in bytes u64), frames
    frame   = bytes of the frame u32, changed elements u32; if an element changed also:
              method of each block (u8), then a section for each method in use, in the methods' order
    section = number of values u64, places, values in the order of their places
    places  = bitmap: one bit for each element of the section's blocks; sparse: Elias-Fano code of the positions among these

Each block has the method that takes the fewest bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from . import elias_fano
from .raw import Bytes

MAGIC = b"WLdl"
FORMAT = 2
LOG_BLOCK = 16
LOG_FRAME_BLOCKS = 5
BLOCK = 1 << LOG_BLOCK
FRAME_BLOCKS = 1 << LOG_FRAME_BLOCKS
FRAME = BLOCK * FRAME_BLOCKS
HEADER = struct.Struct("<4sBBBBQQQ")
FRAME_HEADER = struct.Struct("<II")
SECTION_HEADER = struct.Struct("<Q")

UNCHANGED, BITMAP, SPARSE = 0, 1, 2
"""Methods of a block. ``SPARSE + i`` is Elias-Fano with ``LOW_BITS[i]`` low bits."""
METHODS = SPARSE + len(elias_fano.LOW_BITS)
HEAVY_SHARE = 4
"""With one changed element in this many, or more, a bitmap takes no more bytes than Elias-Fano, so positions are not needed."""
_ONE_CLASS_GAIN = 64
"""A frame's sparse blocks share one number of low bits, which is faster, unless that costs more than 1 in 64 bits."""
_LOW_BITS = np.array(elias_fano.LOW_BITS)[:, None]

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring blocks of a frame with one method."""

    start: int
    """First element in the frame."""
    stop: int
    offset: int
    """Elements of the section before these: place in the section = place in the frame - start + offset."""


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of 8."""
    return -(-nbytes // 8) * 8


def lengths_of_blocks(elements: int) -> Counts:
    """Elements in each block of a frame of `elements`."""
    lengths = np.full(-(-elements // BLOCK), BLOCK, np.int64)
    if lengths.size:
        lengths[-1] = elements - (lengths.size - 1) * BLOCK
    return lengths


def is_heavy(counts: Counts, lengths: Counts) -> npt.NDArray[np.bool_]:
    """For each block whether it is encoded as a bitmap."""
    return counts * HEAVY_SHARE >= lengths


def choose_methods(counts: Counts, lengths: Counts) -> Bytes:
    """The method of each block of a frame, by its number of changed elements."""
    methods: Bytes = _method_by_count().take(counts)
    if lengths[-1] != BLOCK:
        methods[-1:] = _cheapest(counts[-1:], lengths[-1:])
    sparse = methods >= SPARSE
    among = methods[sparse]
    if among.size and (among != among[0]).any():
        bits = _sparse_bits(counts[sparse], lengths[sparse])
        together = bits.sum(1)
        best = int(together.argmin())
        if together[best] * _ONE_CLASS_GAIN <= bits.min(0).sum() * (_ONE_CLASS_GAIN + 1):
            methods[sparse] = SPARSE + best
    return methods


@cache
def _method_by_count() -> Bytes:
    """The method of a full block by its number of changed elements."""
    return _cheapest(np.arange(BLOCK + 1), np.full(BLOCK + 1, BLOCK))


def _cheapest(counts: Counts, lengths: Counts) -> Bytes:
    """The method that takes the fewest bits for each block by itself."""
    methods: Bytes = (SPARSE + _sparse_bits(counts, lengths).argmin(0)).astype(np.uint8)
    methods[is_heavy(counts, lengths)] = BITMAP
    methods[counts == 0] = UNCHANGED
    return methods


def _sparse_bits(counts: Counts, lengths: Counts) -> Counts:
    """Bits of the Elias-Fano code, by number of low bits and block."""
    bits: Counts = counts * (_LOW_BITS + 1) + ((lengths - 1) >> _LOW_BITS)
    return bits


def runs_of(methods: Bytes, method: int, elements: int) -> list[Run]:
    """The blocks of a frame with this method, neighbours together."""
    chosen = np.zeros(methods.size + 2, np.int8)
    chosen[1:-1] = methods == method
    edges = np.diff(chosen)
    runs, offset = [], 0
    for first, last in zip((edges == 1).nonzero()[0].tolist(), (edges == -1).nonzero()[0].tolist(), strict=True):
        start, stop = first * BLOCK, min(last * BLOCK, elements)
        runs.append(Run(start, stop, offset))
        offset += stop - start
    return runs


def elements_in(runs: list[Run]) -> int:
    """Number of elements of all runs."""
    return sum(run.stop - run.start for run in runs)


def shifts_of(runs: list[Run]) -> Counts | None:
    """For each block of a section the distance from a place in the section to the place in the frame; None if all are 0."""
    if len(runs) == 1 and not runs[0].start:
        return None
    blocks = [np.full(-(-(run.stop - run.start) // BLOCK), run.start - run.offset) for run in runs]
    shifts: Counts = np.concatenate(blocks)
    return shifts
