"""From received bytes to a patch, believing nothing."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from weightlane.ckpt_engines import ProtocolError

from . import elias_fano
from .patch import ContiguousValues, Patch, ScatteredValues
from .raw import ITEM_SIZES, PART, Bytes, Positions, Words, tensor_of, unsigned, words_of
from .wire_format import (
    BITMAP,
    DENSE,
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
        """The next `nbytes`, and the zeros behind them up to a multiple of 8."""
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


@dataclass(frozen=True, slots=True)
class Header:
    """What a delta says about itself."""

    elements: int
    """Elements of the segment."""
    itemsize: int
    """Bytes of an element."""
    carried: int
    """Values that it carries."""
    nbytes: int
    """Its length in bytes."""


def read_header(data: torch.Tensor | memoryview | bytes) -> Header:
    """The header of a delta, of which `data` holds at least the beginning; `ProtocolError` for anything else."""
    raw = _bytes_of(data)
    if raw.size < HEADER.size:
        raise _damaged(f"{raw.size} bytes are not even a header")
    magic, form, itemsize, log_block, log_frame, elements, carried, nbytes = HEADER.unpack(raw[: HEADER.size].tobytes())
    if magic != MAGIC:
        raise _damaged("it is not a delta")
    if (form, log_block, log_frame) != (FORMAT, LOG_BLOCK, LOG_FRAME_BLOCKS):
        raise ProtocolError(
            f"a delta of format {form} with blocks of 2**{log_block} and frames of 2**{log_frame} blocks.",
            part=PART,
            hint=f"This side reads format {FORMAT}, 2**{LOG_BLOCK}, 2**{LOG_FRAME_BLOCKS}: install the same version.",
        )
    if itemsize not in ITEM_SIZES:
        raise _damaged(f"elements of {itemsize} bytes")
    return Header(elements, itemsize, carried, nbytes)


def decode(data: torch.Tensor | memoryview | bytes, *, elements: int, itemsize: int) -> Patch:
    """The patch in `data`, checked completely; it owns its memory, so `data` may be reused.

    Args:
        data: What the sender's `Encoded` wrote, to the byte: a 1-D uint8 tensor on CPU, or any buffer.
        elements: Elements of the segment, as the manifest says.
        itemsize: Bytes of an element, as the manifest says.

    Raises:
        ProtocolError: It is not a delta for such a segment: wrong header, lengths or counts that do not match, positions
            outside their blocks or not ascending, bytes left over. No memory is allocated beyond a small multiple of `data`.
    """
    header = read_header(data)
    raw = _bytes_of(data)
    if (header.elements, header.itemsize) != (elements, itemsize):
        raise _damaged(
            f"it is for {header.elements} elements of {header.itemsize} bytes, the segment has {elements} of {itemsize}"
        )
    if header.nbytes != raw.size:
        raise _damaged(f"it says to have {header.nbytes} bytes, there are {raw.size}")
    reader = _Reader(raw[HEADER.size :])
    scattered: list[ScatteredValues] = []
    contiguous: list[ContiguousValues] = []
    for start in range(0, elements, FRAME):
        nbytes, carried = FRAME_HEADER.unpack(reader.take(FRAME_HEADER.size).tobytes())
        if nbytes < FRAME_HEADER.size or nbytes % 8:
            raise _damaged(f"a frame of {nbytes} bytes")
        body = _Reader(reader.take(nbytes - FRAME_HEADER.size))
        _Frame(body, start, min(FRAME, elements - start), itemsize, carried).read(scattered, contiguous)
    if reader.left:
        raise _damaged(f"{reader.left} bytes are left over")
    patch = Patch(elements, itemsize, tuple(scattered), tuple(contiguous))
    if patch.carried != header.carried:
        raise _damaged(f"it carries {patch.carried} values, its header says {header.carried}")
    return patch


class _Frame:
    """One frame's bytes, read section by section."""

    def __init__(self, body: _Reader, start: int, elements: int, itemsize: int, carried: int) -> None:
        self.body = body
        self.start = start
        self.elements = elements
        self.itemsize = itemsize
        self.carried = carried

    def read(self, scattered: list[ScatteredValues], contiguous: list[ContiguousValues]) -> None:
        """Append what the frame holds."""
        total = 0
        if self.body.left:
            methods = self.body.take(lengths_of_blocks(self.elements).size)
            if methods.max() >= METHODS:
                raise _damaged(f"method {methods.max()} is unknown")
            for method in np.unique(methods).tolist():
                if method != UNCHANGED:
                    total += self._section(method, runs_of(methods, method, self.elements), scattered, contiguous)
        if self.body.left:
            raise _damaged(f"{self.body.left} bytes are left over in a frame")
        if total != self.carried:
            raise _damaged(f"a frame carries {total} values, its header says {self.carried}")

    def _section(
        self,
        method: int,
        runs: list[Run],
        scattered: list[ScatteredValues],
        contiguous: list[ContiguousValues],
    ) -> int:
        universe = elements_in(runs)
        (count,) = self.body.header(SECTION_HEADER)
        if not 0 < count <= universe:
            raise _damaged(f"{count} values for {universe} elements")
        if method == DENSE:
            if count != universe:
                raise _damaged(f"{count} values for all of {universe} elements")
            values = self._values(count)
            for run in runs:
                piece = values[run.offset : run.offset + run.stop - run.start]
                contiguous.append(ContiguousValues(self.start + run.start, tensor_of(piece)))
            return count
        places = self._bitmap(count, universe) if method == BITMAP else self._sparse(method, count, universe)
        shifts = shifts_of(runs)
        if shifts is not None:
            places += shifts.take(places >> LOG_BLOCK)
        positions = torch.from_numpy(places.astype(np.int32))
        scattered.append(ScatteredValues(self.start, positions, tensor_of(self._values(count))))
        return count

    def _bitmap(self, count: int, universe: int) -> Positions:
        bits = np.unpackbits(self.body.take(-(-universe // 8)), bitorder="little").view(np.bool_)
        places = bits.nonzero()[0]
        if places.size != count or places[-1] >= universe:
            raise _damaged(f"a bitmap of {universe} has {places.size} bits set for {count} values")
        return places

    def _sparse(self, method: int, count: int, universe: int) -> Positions:
        low_bits = elias_fano.LOW_BITS[method - SPARSE]
        return elias_fano.decode(
            self.body.take(elias_fano.nbytes(count, universe, low_bits)), count, universe, low_bits
        )

    def _values(self, count: int) -> Words:
        words: Words = self.body.take(count * self.itemsize).copy().view(unsigned(self.itemsize))
        return words


def _bytes_of(data: torch.Tensor | memoryview | bytes) -> Bytes:
    if isinstance(data, torch.Tensor):
        return words_of(data).view(np.uint8)
    return np.frombuffer(data, np.uint8)


def _damaged(what: str) -> ProtocolError:
    return ProtocolError(f"the delta is damaged: {what}.", part=PART, hint=_HINT)
