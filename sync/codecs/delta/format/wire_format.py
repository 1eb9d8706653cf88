"""The wire format of a delta: the headers of a segment and of its blocks, the places of changed elements, and their flips.

A *segment* is a run of elements of one size, for example a rank's shard of one tensor. It is cut into *blocks* of 2**20 elements.
All numbers are little-endian. Every item starts at a multiple of 8 bytes; zeros fill the space between::

    segment = header (32 bytes: magic, format, element size, log2 of elements per block, 0,
                      elements u64, changed elements u64, length of all of it in bytes u64), blocks
    block   = header (16 bytes: changed elements u32, bytes of the places u32, bytes of the flips u32,
                      bytes per gap u8, bytes per flip u8, 0 u16), places, flips
    places  = gaps of 1 or 2 bytes, or a bitmap (0 bytes per gap): one bit for each element of the block
    flips   = base XOR new version of each changed element, in the order of the places

Each block has the places that take the fewest bytes. Where 1 % of the elements of a bfloat16 tensor changed by one step of their
mantissa, a change takes 2.1 bytes.

The gap of a changed element is the number of unchanged elements between it and the changed one before. The largest number that
fits into a code (255 or 65535) says that so many unchanged elements follow and that the next code continues the same gap. So gaps
of one byte take 1.08 bytes per place where 1 % of the elements changed at random, and the entropy of such places is 1.01 bytes.
The places that are decoded ascend by construction.

The flips of a block have the size of its elements, or one byte each. No changed element has a flip of 0, so a byte of 0 stands
for a flip that does not fit into a byte. These flips follow the bytes, in order and in the size of elements. An optimizer step
mostly changes the lowest bits of a bfloat16.
"""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from weightlane.ckpt_engines import ProtocolError

from .integer_views import PART, Bytes, Positions, Words, unsigned

MAGIC = b"WLdl"
FORMAT = 3
LOG_BLOCK = 20
BLOCK = 1 << LOG_BLOCK
"""Elements of a block: so many that the calls for a block cost little, and so few that both versions stay in a CPU's cache."""
HEADER = struct.Struct("<4sBBBBQQQ")
BLOCK_HEADER = struct.Struct("<IIIBBH")


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of 8."""
    return -(-nbytes // 8) * 8


def padded(part: Bytes) -> list[Bytes]:
    """The part, and the zeros that make its length a multiple of 8."""
    spare = aligned(part.size) - part.size
    return [part, np.zeros(spare, np.uint8)] if spare else [part]


BITMAP = 0
GAP_BYTES = (1, 2)
"""Sizes of a gap's code. With 2, blocks in which one element in thousands changed take fewest bytes."""


def encode_places(positions: Positions, elements: int) -> tuple[int, Bytes]:
    """Encode positions, strictly ascending and below `elements`. Returns the bytes per gap, or `BITMAP`, and the code."""
    shortest = -(-elements // 8)
    if positions.size < shortest:
        gaps = np.diff(positions, prepend=-1).astype(np.uint32) - np.uint32(1)
        width = min(GAP_BYTES, key=lambda width: _nbytes(gaps, width))
        if _nbytes(gaps, width) < shortest:
            return width, _codes(gaps, width)
    mask = np.zeros(elements, np.bool_)
    mask[positions] = True
    return BITMAP, np.packbits(mask, bitorder="little")


def decode_places(data: Bytes, width: int, count: int, elements: int) -> Positions:
    """Decode `count` positions, at least one, below `elements`.

    Raises:
        ProtocolError: `encode_places` did not make `data`.
    """
    if width == BITMAP and data.size == -(-elements // 8):
        positions = np.unpackbits(data, bitorder="little").view(np.bool_).nonzero()[0]
    elif width in GAP_BYTES and data.size % width == 0:
        codes = data.view(unsigned(width))
        ends = (codes != _most(width)).nonzero()[0]
        positions = np.cumsum(codes, dtype=np.int64).take(ends)
        positions += np.arange(ends.size)
        if ends.size and ends[-1] != codes.size - 1:
            raise ProtocolError("the last gap of a block does not end.", part=PART)
    else:
        raise ProtocolError(f"{data.size} bytes are no places with gaps of {width} bytes.", part=PART)
    if positions.size != count:
        raise ProtocolError(f"{positions.size} places instead of {count}.", part=PART)
    if positions[-1] >= elements:
        raise ProtocolError(f"place {positions[-1]} of {elements}.", part=PART)
    return positions


def _most(width: int) -> int:
    """The code that says that a gap continues."""
    return int((1 << 8 * width) - 1)


def _nbytes(gaps: npt.NDArray[np.uint32], width: int) -> int:
    return width * (gaps.size + int((gaps // np.uint32(_most(width))).sum()))


def _codes(gaps: npt.NDArray[np.uint32], width: int) -> Bytes:
    most = np.uint32(_most(width))
    more = gaps // most
    codes = np.full(gaps.size + int(more.sum()), most, unsigned(width))
    codes[np.cumsum(more, dtype=np.int64) + np.arange(gaps.size)] = gaps - more * most
    return codes.view(np.uint8)


_SMALL = 1 << 8


def encode_flips(flips: Words) -> tuple[int, list[Bytes]]:
    """Encode flips, none of which is 0. Returns the bytes per flip, and arrays that follow each other."""
    large = (flips >= _SMALL).nonzero()[0] if flips.itemsize > 1 else flips[:0]
    if flips.size + flips.itemsize * large.size >= flips.itemsize * flips.size:
        return flips.itemsize, [flips.view(np.uint8)]
    codes = flips.astype(np.uint8)
    codes[large] = 0
    return 1, [codes, flips.take(large).view(np.uint8)]


def decode_flips(data: Bytes, width: int, count: int, itemsize: int) -> Words:
    """Decode `count` flips of elements of `itemsize` bytes; the result has memory of its own.

    Raises:
        ProtocolError: `encode_flips` did not make `data`.
    """
    if width == itemsize and data.size == count * itemsize:
        whole: Words = data.copy().view(unsigned(itemsize))
        return whole
    codes = data[:count]
    large = (codes == 0).nonzero()[0]
    if width != 1 or data.size != count + large.size * itemsize:
        raise ProtocolError(f"{data.size} bytes are no {count} flips of {width} bytes.", part=PART)
    flips: Words = codes.astype(unsigned(itemsize))
    flips[large] = data[count:].copy().view(unsigned(itemsize))
    return flips
