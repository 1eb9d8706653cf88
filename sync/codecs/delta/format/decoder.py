"""The decoder: from received bytes, which are not trusted, to a patch."""

from __future__ import annotations

import struct

import numpy as np
import torch

from weightlane.ckpt_engines import ProtocolError

from . import flips, gaps
from .integer_views import PART, Bytes, tensor_of, words_of
from .patch import BlockFlips, Patch
from .wire_format import BLOCK, BLOCK_HEADER, FORMAT, HEADER, LOG_BLOCK, MAGIC, aligned

_HINT = "The sender and this side disagree, or the bytes were damaged; a full version helps."


class _Reader:
    """Takes parts off the front of some bytes."""

    def __init__(self, data: Bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return self._data.size - self._at

    def take(self, nbytes: int) -> Bytes:
        """The next `nbytes`; the zeros that fill them up to a multiple of 8 are skipped."""
        end = self._at + aligned(nbytes)
        if end > self._data.size:
            raise _damaged(f"{aligned(nbytes)} bytes were to follow, there are {self.left}")
        part = self._data[self._at : self._at + nbytes]
        if self._data[self._at + nbytes : end].any():
            raise _damaged("filling bytes are not zero")
        self._at = end
        return part

    def header(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size).tobytes())


def decode(data: torch.Tensor | memoryview | bytes, *, elements: int, itemsize: int) -> Patch:
    """Decode a delta and check it completely. The patch owns its memory, so `data` may be reused.

    Args:
        data: The bytes of the sender's `Encoded`: a 1-D uint8 tensor on CPU, or any buffer.
        elements: Elements of the segment, from the manifest.
        itemsize: Bytes of an element, from the manifest.

    Raises:
        ProtocolError: `data` is not a delta for such a segment: wrong header, lengths or counts that do not match, places
            outside their blocks, bytes left over. No memory is allocated beyond a small multiple of `data`.
    """
    raw = words_of(data).view(np.uint8) if isinstance(data, torch.Tensor) else np.frombuffer(data, np.uint8)
    changed = _checked_header(raw, elements, itemsize)
    reader = _Reader(raw[HEADER.size :])
    blocks = [
        block
        for start in range(0, elements, BLOCK)
        if (block := _block(reader, start, min(BLOCK, elements - start), itemsize)) is not None
    ]
    if reader.left:
        raise _damaged(f"{reader.left} bytes are left over")
    patch = Patch(elements, itemsize, tuple(blocks))
    if patch.carried != changed:
        raise _damaged(f"it changes {patch.carried} elements, its header says {changed}")
    return patch


def _checked_header(raw: Bytes, elements: int, itemsize: int) -> int:
    """Check the header. Returns the number of changed elements that it declares."""
    if raw.size < HEADER.size:
        raise _damaged(f"{raw.size} bytes are not even a header")
    magic, form, size, log_block, _, numel, changed, nbytes = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise _damaged("it is not a delta")
    if (form, log_block) != (FORMAT, LOG_BLOCK):
        raise ProtocolError(
            f"a delta of format {form} with blocks of 2**{log_block}.",
            part=PART,
            hint=f"This side reads format {FORMAT}, 2**{LOG_BLOCK}: install the same version.",
        )
    if (numel, size) != (elements, itemsize):
        raise _damaged(f"it is for {numel} elements of {size} bytes, the segment has {elements} of {itemsize}")
    if nbytes != raw.size:
        raise _damaged(f"it says to have {nbytes} bytes, there are {raw.size}")
    return int(changed)


def _block(reader: _Reader, start: int, elements: int, itemsize: int) -> BlockFlips | None:
    """The changes of the block that begins at element `start`; None if there are none."""
    changed, place_bytes, code_bytes, gap_bytes, flip_bytes, zero = reader.header(BLOCK_HEADER)
    if changed > elements or zero:
        raise _damaged(f"a block of {elements} elements with {changed} changed ones")
    places, code = reader.take(place_bytes), reader.take(code_bytes)
    if not changed:
        if place_bytes or code_bytes:
            raise _damaged("a block has bytes and no changes")
        return None
    try:
        positions = gaps.decode(places, gap_bytes, changed, elements)
        flipped = flips.decode(code, flip_bytes, changed, itemsize)
    except ProtocolError as error:
        raise _damaged(error.message.rstrip(".")) from None
    return BlockFlips(start, torch.from_numpy(positions.astype(np.int32)), tensor_of(flipped))


def _damaged(what: str) -> ProtocolError:
    return ProtocolError(f"the delta is damaged: {what}.", part=PART, hint=_HINT)
