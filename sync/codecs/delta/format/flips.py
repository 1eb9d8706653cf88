"""Flips of changed elements: the bits in which the base and the new version differ (base XOR new), in one of two encodings.

The flips of a block have the size of its elements, or one byte each. No changed element has a flip of 0, so a byte of 0 stands
for a flip that does not fit into a byte. These flips follow the bytes, in order and in the size of elements. An optimizer step
mostly changes the lowest bits of a bfloat16.
"""

from __future__ import annotations

import numpy as np

from weightlane.ckpt_engines import ProtocolError

from .integer_views import PART, Bytes, Words, unsigned

_SMALL = 1 << 8


def encode(flips: Words) -> tuple[int, list[Bytes]]:
    """Encode flips, none of which is 0. Returns the bytes per flip, and arrays that follow each other."""
    large = (flips >= _SMALL).nonzero()[0] if flips.itemsize > 1 else flips[:0]
    if flips.size + flips.itemsize * large.size >= flips.itemsize * flips.size:
        return flips.itemsize, [flips.view(np.uint8)]
    codes = flips.astype(np.uint8)
    codes[large] = 0
    return 1, [codes, flips.take(large).view(np.uint8)]


def decode(data: Bytes, width: int, count: int, itemsize: int) -> Words:
    """Decode `count` flips of elements of `itemsize` bytes; the result has memory of its own.

    Raises:
        ProtocolError: `encode` did not make `data`.
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
