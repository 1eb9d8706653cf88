"""The wire format of a delta: the headers of a segment and of its blocks.

A *segment* is a run of elements of one size, for example a rank's shard of one tensor. It is cut into *blocks* of 2**20 elements.
All numbers are little-endian. Every item starts at a multiple of 8 bytes; zeros fill the space between::

    segment = header (32 bytes: magic, format, element size, log2 of elements per block, 0,
                      elements u64, changed elements u64, length of all of it in bytes u64), blocks
    block   = header (16 bytes: changed elements u32, bytes of the places u32, bytes of the flips u32,
                      bytes per gap u8, bytes per flip u8, 0 u16), places, flips
    places  = gaps of 1 or 2 bytes (`gaps`), or a bitmap (0 bytes per gap): one bit for each element of the block
    flips   = base XOR new version of each changed element, in the order of the places (`flips`)

Each block has the places that take the fewest bytes. Where 1 % of the elements of a bfloat16 tensor changed by one step of their
mantissa, a change takes 2.1 bytes.
"""

from __future__ import annotations

import struct

import numpy as np

from .integer_views import Bytes

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
