"""A decoded delta, which flips bits of a tensor, and the decoder: from received bytes, which are not trusted, to a `Patch`."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch

from weightlane.ckpt_engines import ConfigError, ProtocolError

from .integer_views import INTEGERS, PART, Bytes, integer_view, tensor_of, words_of
from .wire_format import BLOCK, BLOCK_HEADER, FORMAT, HEADER, LOG_BLOCK, MAGIC, aligned, decode_flips, decode_places

_HOST_CHUNK = 1 << 15
"""Elements flipped at once on a CPU, so few that their copies and their positions widened to 64 bits stay in the cache."""


@dataclass(frozen=True, slots=True)
class BlockFlips:
    """The changes of one block of the segment."""

    base: int
    """The block's first element, from which positions count."""
    positions: torch.Tensor
    """int32, strictly ascending."""
    flips: torch.Tensor
    """Integers of the element size, one for each position: the bits in which the two versions differ."""


@dataclass(frozen=True, slots=True)
class Patch:
    """The decoded changes of one segment. Positions are proven to lie in the segment and to occur once."""

    elements: int
    """Elements of the segment."""
    itemsize: int
    """Bytes of an element."""
    blocks: tuple[BlockFlips, ...]
    """In their order."""

    @property
    def carried(self) -> int:
        """Number of changed elements."""
        return sum(block.flips.numel() for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """Memory in bytes: the flips, and 4 bytes for the position of each."""
        return self.carried * (self.itemsize + 4)

    def to(self, device: torch.device | str) -> Patch:
        """The patch on another device."""
        blocks = [BlockFlips(each.base, each.positions.to(device), each.flips.to(device)) for each in self.blocks]
        return Patch(self.elements, self.itemsize, tuple(blocks))

    def positions_and_flips(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All changes as positions (int64, ascending, in the segment) and flips (integers of the element size)."""
        if not self.blocks:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=INTEGERS[self.itemsize])
        positions = torch.cat([block.positions.long().add_(block.base) for block in self.blocks])
        return positions, torch.cat([block.flips for block in self.blocks])

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
        chunk = _HOST_CHUNK if flat.is_cpu else BLOCK
        scratch = torch.empty(chunk, dtype=torch.int64, device=flat.device)
        for block in self.blocks:
            part = flat[block.base :]
            for start in range(0, block.positions.numel(), chunk):
                positions, flips = (each[start : start + chunk] for each in (block.positions, block.flips))
                at = scratch[: positions.numel()].copy_(positions)
                part.scatter_(0, at, part.index_select(0, at).bitwise_xor_(flips))


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
        positions = decode_places(places, gap_bytes, changed, elements)
        flipped = decode_flips(code, flip_bytes, changed, itemsize)
    except ProtocolError as error:
        raise _damaged(error.message.rstrip(".")) from None
    return BlockFlips(start, torch.from_numpy(positions.astype(np.int32)), tensor_of(flipped))


def _damaged(what: str) -> ProtocolError:
    return ProtocolError(f"the delta is damaged: {what}.", part=PART, hint=_HINT)
