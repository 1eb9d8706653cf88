"""The decoder: from received bytes, which are not trusted, to a patch."""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np
import torch

from weightlane.ckpt_engines import ProtocolError

from . import elias_fano
from .patch import Patch, ScatteredValues
from .raw import PART, Bytes, Positions, tensor_of, unsigned, words_of
from .wire_format import (
    BITMAP,
    FORMAT,
    FRAME,
    FRAME_HEADER,
    HEADER,
    LOG_BLOCK,
    LOG_FRAME_BLOCKS,
    MAGIC,
    METHODS,
    SECTION_HEADER,
    SPARSE,
    UNCHANGED,
    Run,
    aligned,
    elements_in,
    lengths_of_blocks,
    runs_of,
    shifts_of,
)

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
        ProtocolError: `data` is not a delta for such a segment: wrong header, lengths or counts that do not match, positions
            outside their blocks or not ascending, bytes left over. No memory is allocated beyond a small multiple of `data`.
    """
    raw = words_of(data).view(np.uint8) if isinstance(data, torch.Tensor) else np.frombuffer(data, np.uint8)
    carried = _checked_header(raw, elements, itemsize)
    reader = _Reader(raw[HEADER.size :])
    scattered: list[ScatteredValues] = []
    for start in range(0, elements, FRAME):
        nbytes, changed = reader.header(FRAME_HEADER)
        if nbytes < FRAME_HEADER.size or nbytes % 8:
            raise _damaged(f"a frame of {nbytes} bytes")
        body = _Reader(reader.take(nbytes - FRAME_HEADER.size))
        parts = list(_frame_values(body, start, min(FRAME, elements - start), itemsize))
        if (found := sum(part.values.numel() for part in parts)) != changed:
            raise _damaged(f"a frame carries {found} values, its header says {changed}")
        scattered += parts
    if reader.left:
        raise _damaged(f"{reader.left} bytes are left over")
    patch = Patch(elements, itemsize, tuple(scattered))
    if patch.carried != carried:
        raise _damaged(f"it carries {patch.carried} values, its header says {carried}")
    return patch


def _checked_header(raw: Bytes, elements: int, itemsize: int) -> int:
    """The number of values that the header announces."""
    if raw.size < HEADER.size:
        raise _damaged(f"{raw.size} bytes are not even a header")
    magic, form, size, log_block, log_frame, numel, carried, nbytes = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise _damaged("it is not a delta")
    if (form, log_block, log_frame) != (FORMAT, LOG_BLOCK, LOG_FRAME_BLOCKS):
        raise ProtocolError(
            f"a delta of format {form} with blocks of 2**{log_block} and frames of 2**{log_frame} blocks.",
            part=PART,
            hint=f"This side reads format {FORMAT}, 2**{LOG_BLOCK}, 2**{LOG_FRAME_BLOCKS}: install the same version.",
        )
    if (numel, size) != (elements, itemsize):
        raise _damaged(f"it is for {numel} elements of {size} bytes, the segment has {elements} of {itemsize}")
    if nbytes != raw.size:
        raise _damaged(f"it says to have {nbytes} bytes, there are {raw.size}")
    return int(carried)


def _frame_values(body: _Reader, start: int, elements: int, itemsize: int) -> Iterator[ScatteredValues]:
    """The values in the body of the frame that begins at element `start`."""
    if not body.left:
        return
    methods = body.take(lengths_of_blocks(elements).size)
    if methods.max() >= METHODS:
        raise _damaged(f"method {methods.max()} is unknown")
    for method in np.unique(methods).tolist():
        if method == UNCHANGED:
            continue
        runs = runs_of(methods, method, elements)
        universe = elements_in(runs)
        (count,) = body.header(SECTION_HEADER)
        if not 0 < count <= universe:
            raise _damaged(f"{count} values for {universe} elements")
        places = _places(body, method, runs, count, universe)
        values = body.take(count * itemsize).copy().view(unsigned(itemsize))
        yield ScatteredValues(start, torch.from_numpy(places.astype(np.int32)), tensor_of(values))
    if body.left:
        raise _damaged(f"{body.left} bytes are left over in a frame")


def _places(body: _Reader, method: int, runs: list[Run], count: int, universe: int) -> Positions:
    """The positions in the frame of a section's values."""
    if method == BITMAP:
        bits = np.unpackbits(body.take(-(-universe // 8)), bitorder="little").view(np.bool_)
        places = bits.nonzero()[0]
        if places.size != count or places[-1] >= universe:
            raise _damaged(f"a bitmap of {universe} has {places.size} bits set for {count} values")
    else:
        low_bits = elias_fano.LOW_BITS[method - SPARSE]
        data = body.take(elias_fano.nbytes(count, universe, low_bits))
        places = elias_fano.decode(data, count, universe, low_bits)
    shifts = shifts_of(runs)
    if shifts is not None:
        places += shifts.take(places >> LOG_BLOCK)
    return places


def _damaged(what: str) -> ProtocolError:
    return ProtocolError(f"the delta is damaged: {what}.", part=PART, hint=_HINT)
