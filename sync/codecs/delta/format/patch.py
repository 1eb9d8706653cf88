"""A decoded delta, which flips bits of a tensor, and the decoder: from received bytes, which are not trusted, to a `Patch`."""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from weightlane.ckpt_engines import ConfigError, ProtocolError

from . import cuda_kernels
from .integer_views import PART, Bytes, Positions, Words, integer_view, tensor_of, unsigned, words_of
from .wire_format import BLOCK, BLOCK_HEADER, FORMAT, HEADER, LOG_BLOCK, MAGIC, aligned, decode_flips, decode_places

_CHUNK = 1 << 15
"""Elements flipped at once, so few that their copies and their positions widened to 64 bits stay in the cache."""


@dataclass(frozen=True, slots=True)
class Patch:
    """The decoded changes of one segment. Positions are proven to lie in the segment and to occur once."""

    elements: int
    """Elements of the segment."""
    itemsize: int
    """Bytes of an element."""
    positions: torch.Tensor
    """Positions of changed elements in the segment, strictly ascending; int32 where that suffices, else int64."""
    flips: torch.Tensor
    """Integers of the element size, one for each position: the bits in which the two versions differ."""

    @property
    def carried(self) -> int:
        """Number of changed elements."""
        return self.flips.numel()

    def to(self, device: torch.device | str) -> Patch:
        """The patch on another device."""
        return replace(self, positions=self.positions.to(device), flips=self.flips.to(device))

    def flip_(self, target: torch.Tensor) -> None:
        """Flip the bits of `target` in which the two versions differ. This turns one version into the other, in both directions.

        Args:
            target: The segment: contiguous, on the patch's device.

        Raises:
            ConfigError: `target` has another number of elements, element size or layout.
        """
        if (target.numel(), target.itemsize) != (self.elements, self.itemsize):
            raise ConfigError(
                f"a patch for {self.elements} elements of {self.itemsize} bytes was to be put into {target.numel()} of "
                f"{target.itemsize}.",
                part=PART,
                hint="Apply it to the segment it was made for.",
            )
        flat = integer_view(target)
        if flat.device.type != "cpu":
            cuda_kernels.flip(flat, self.positions, self.flips)
            return
        scratch = torch.empty(min(_CHUNK, self.carried), dtype=torch.int64)
        for start in range(0, self.carried, _CHUNK):
            positions, flips = (each[start : start + _CHUNK] for each in (self.positions, self.flips))
            at = scratch[: positions.numel()].copy_(positions)
            flat.scatter_(0, at, flat.index_select(0, at).bitwise_xor_(flips))


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
    narrow: npt.DTypeLike = np.int32 if elements <= np.iinfo(np.int32).max else np.int64
    positions: list[Words] = [np.empty(0, narrow)]
    flips: list[Words] = [np.empty(0, unsigned(itemsize))]
    for start in range(0, elements, BLOCK):
        block = _block(reader, min(BLOCK, elements - start), itemsize)
        if block is not None:
            positions.append((block[0] + start).astype(narrow))
            flips.append(block[1])
    if reader.left:
        raise _damaged(f"{reader.left} bytes are left over")
    at, flipped = np.concatenate(positions), np.concatenate(flips)
    if at.size != changed:
        raise _damaged(f"it changes {at.size} elements, its header says {changed}")
    return Patch(elements, itemsize, torch.from_numpy(at), tensor_of(flipped))


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


def _block(reader: _Reader, elements: int, itemsize: int) -> tuple[Positions, Words] | None:
    """The positions of the changes of the next block, which has so many elements, and the flips; None if there are none."""
    changed, place_bytes, code_bytes, gap_bytes, flip_bytes, zero = reader.header(BLOCK_HEADER)
    if changed > elements or zero:
        raise _damaged(f"a block of {elements} elements with {changed} changed ones")
    places, code = reader.take(place_bytes), reader.take(code_bytes)
    if not changed:
        if place_bytes or code_bytes:
            raise _damaged("a block has bytes and no changes")
        return None
    try:
        return decode_places(places, gap_bytes, changed, elements), decode_flips(code, flip_bytes, changed, itemsize)
    except ProtocolError as error:
        raise _damaged(error.message.rstrip(".")) from None


def _damaged(what: str) -> ProtocolError:
    return ProtocolError(f"the delta is damaged: {what}.", part=PART, hint=_HINT)
