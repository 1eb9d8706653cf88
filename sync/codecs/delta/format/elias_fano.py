"""Elias-Fano coding of sorted positions: close to the entropy bound, with a size known beforehand, and without a loop.

The low l bits of each of n positions below U are stored as they are. The high bits form a bitmap: position i sets bit
``(position >> l) + i``. Both together take ``n l + n + (U - 1 >> l)`` bits. With the best l this is at most about half a bit per
position above the entropy of random positions (1.07 bytes where 1 % is set). The size depends on n and U only, so the best of
several encodings is found by counting.

Source: P. Elias, "Efficient storage and retrieval by content and address of static files", J. ACM 21 (1974), 246-260.

The low bits lie in planes of 8, 4 and 2 bits, so that a few operations on whole arrays pack them. Therefore l is even.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weightlane.ckpt_engines import ProtocolError

from .raw import PART, Bytes, Positions

LOW_BITS = (2, 4, 6, 8, 10, 12, 14, 16)
"""Possible numbers of low bits: up to a single position in a block of 2**16 elements."""
_RAMP = np.arange(1 << 22)
_NIBBLES = (np.arange(256, dtype=np.uint16) & 15) | (np.arange(256, dtype=np.uint16) >> 4 << 8)
_PAIRS = sum(((np.arange(256, dtype=np.uint32) >> 2 * i & 3) << 8 * i for i in range(4)), np.zeros(256, np.uint32))


def planes(low_bits: int) -> tuple[tuple[int, int], ...]:
    """First bit and width of each plane of the low bits, lowest first."""
    cut, at = [], 0
    for width in (8, 8, 4, 2):
        if low_bits - at >= width:
            cut.append((at, width))
            at += width
    return tuple(cut)


def nbytes(count: int, universe: int, low_bits: int) -> int:
    """Size in bytes of `count` positions below `universe`."""
    low = sum(-(-count * width // 8) for _, width in planes(low_bits))
    return low + -(-(count + ((universe - 1) >> low_bits)) // 8)


def encode(positions: Positions, universe: int, low_bits: int) -> list[Bytes]:
    """Encode positions, strictly ascending and below `universe`, as arrays of bytes that follow each other."""
    count = positions.size
    low = positions.astype(np.uint16)
    parts = [_pack(low >> np.uint16(first) if first else low, width) for first, width in planes(low_bits)]
    bits = np.zeros(count + ((universe - 1) >> low_bits), np.uint8)
    at = positions >> low_bits
    at += _RAMP[:count]
    bits[at] = 1
    return [*parts, np.packbits(bits, bitorder="little")]


def decode(data: Bytes, count: int, universe: int, low_bits: int) -> Positions:
    """Decode the positions in `data`, which has `nbytes(count, universe, low_bits)` bytes.

    Raises:
        ProtocolError: `encode` did not make `data`.
    """
    low, at = np.zeros(count, np.uint16), 0
    for first, width in planes(low_bits):
        size = -(-count * width // 8)
        low |= _unpack(data[at : at + size], width, count).astype(np.uint16) << first
        at += size
    positions = np.unpackbits(data[at:], bitorder="little").view(np.bool_).nonzero()[0]
    if positions.size != count:
        raise ProtocolError(f"{positions.size} positions instead of {count}.", part=PART)
    positions -= _RAMP[:count]
    positions <<= low_bits
    positions |= low
    if count and positions[-1] >= universe:
        raise ProtocolError(f"position {positions[-1]} of {universe}.", part=PART)
    if not (positions[1:] > positions[:-1]).all():
        raise ProtocolError("positions do not ascend.", part=PART)
    return positions


def _pack(low: npt.NDArray[np.uint16], width: int) -> Bytes:
    """Pack the lowest `width` bits of each entry."""
    if width == 8:  # noqa: PLR2004 - whole bytes
        return low.astype(np.uint8)
    per_byte = 8 // width
    entries = np.zeros(-(-low.size // per_byte) * per_byte, np.uint8)
    np.bitwise_and(low, (1 << width) - 1, out=entries[: low.size], casting="unsafe")
    if per_byte == 2:  # noqa: PLR2004 - nibbles
        pairs = entries.view(np.uint16)
        return (pairs | pairs >> 4).astype(np.uint8)
    fours = entries.view(np.uint32)
    return (fours | fours >> 6 | fours >> 12 | fours >> 18).astype(np.uint8)


def _unpack(data: Bytes, width: int, count: int) -> Bytes:
    if width == 8:  # noqa: PLR2004 - whole bytes
        return data
    entries: Bytes = (_NIBBLES if width == 4 else _PAIRS).take(data).view(np.uint8)  # noqa: PLR2004 - nibbles
    if entries[count:].any():
        raise ProtocolError("bits behind the last position are set.", part=PART)
    return entries[:count]
