"""The encoder: from two versions of a segment to the bytes that turn one into the other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from weightlane.ckpt_engines import ConfigError

from . import cuda_kernels, elias_fano
from .frame_changes import DeviceChanges, FrameChanges, HostChanges
from .raw import PART, Bytes, Words, integer_view, words_of
from .wire_format import (
    BITMAP,
    FORMAT,
    FRAME,
    FRAME_HEADER,
    HEADER,
    LOG_BLOCK,
    LOG_FRAME_BLOCKS,
    MAGIC,
    SECTION_HEADER,
    SPARSE,
    UNCHANGED,
    aligned,
    choose_methods,
    elements_in,
    lengths_of_blocks,
    runs_of,
    shifts_of,
)


@dataclass(frozen=True, slots=True)
class Encoded:
    """The delta of a segment, ready to be written."""

    elements: int
    """Elements of the segment."""
    changed: int
    """Elements whose bits differ."""
    nbytes: int
    """Length on the wire in bytes; a multiple of 8."""
    parts: tuple[Bytes, ...] = field(repr=False)

    def write_into(self, buffer: torch.Tensor) -> int:
        """Write the delta to the beginning of `buffer` (1-D uint8, on CPU, at least `nbytes` long); returns `nbytes`."""
        if buffer.numel() < self.nbytes:
            raise ConfigError(f"a buffer of {buffer.numel()} bytes for a delta of {self.nbytes}.", part=PART)
        target = words_of(buffer)
        at = 0
        for part in self.parts:
            target[at : at + part.size] = part
            at += part.size
        return at

    def to_bytes(self) -> torch.Tensor:
        """The delta as a uint8 tensor of its own."""
        buffer = torch.empty(self.nbytes, dtype=torch.uint8)
        self.write_into(buffer)
        return buffer


@dataclass(frozen=True, slots=True)
class TooDense:
    """A delta that was given up because it exceeds its capacity: the segment is sent dense."""

    capacity_bytes: int
    reached_bytes: int
    """Bytes that the delta had reached, at least, when it was given up."""
    compared: float
    """Share of the elements that had been compared by then."""

    def __str__(self) -> str:
        return (
            f"the delta reached {self.reached_bytes} bytes, more than the {self.capacity_bytes} allowed, "
            f"after {self.compared:.0%} of the elements"
        )


@dataclass(frozen=True, slots=True)
class _Frame:
    changed: int
    nbytes: int
    parts: tuple[Bytes, ...]


def encode(old: torch.Tensor, new: torch.Tensor, *, capacity_bytes: int | None = None) -> Encoded | TooDense:
    """Encode the changes that turn `old` into `new`, bit for bit.

    Elements are compared as unsigned integers: -0.0 differs from 0.0, and a NaN equals another with the same bits.

    Args:
        old: The base, of any dtype with elements of 1, 2, 4 or 8 bytes; contiguous; on CPU or a CUDA device.
        new: The new version, of the same dtype, number of elements and device.
        capacity_bytes: Give up as soon as the delta cannot fit; None for no limit.

    Raises:
        ConfigError: The tensors cannot be compared.
    """
    if old.dtype != new.dtype or old.numel() != new.numel() or old.device != new.device:
        raise ConfigError(
            f"{old.numel()} elements of {old.dtype} on {old.device} were compared with {new.numel()} of {new.dtype} on "
            f"{new.device}.",
            part=PART,
            hint="Keep the base in the dtype, shape and place of the new version.",
        )
    elements, itemsize = new.numel(), new.itemsize
    capacity = float("inf") if capacity_bytes is None else capacity_bytes
    changes: HostChanges | DeviceChanges
    if new.device.type == "cpu":
        changes = HostChanges(words_of(old), words_of(new))
    else:
        counted = cuda_kernels.count_changes(integer_view(old), integer_view(new))
        if counted.total * itemsize > capacity:
            return TooDense(int(capacity), counted.total * itemsize, 1.0)
        positions, values = counted.compact()
        changes = DeviceChanges(positions.cpu().numpy(), words_of(values.cpu()))
    frames: list[_Frame] = []
    total = HEADER.size
    for start in range(0, elements, FRAME):
        stop = min(start + FRAME, elements)
        frames.append(_encode_frame(changes.frame(start, stop), stop - start))
        total += frames[-1].nbytes
        if total > capacity:
            return TooDense(int(capacity), total, stop / elements)
    if total > capacity:
        return TooDense(int(capacity), total, 1.0)
    changed = sum(frame.changed for frame in frames)
    header = HEADER.pack(MAGIC, FORMAT, itemsize, LOG_BLOCK, LOG_FRAME_BLOCKS, elements, changed, total)
    parts = (np.frombuffer(header, np.uint8), *(part for frame in frames for part in frame.parts))
    return Encoded(elements, changed, total, parts)


def _encode_frame(changes: FrameChanges | None, elements: int) -> _Frame:
    if changes is None:
        header = np.frombuffer(FRAME_HEADER.pack(FRAME_HEADER.size, 0), np.uint8)
        return _Frame(0, header.size, (header,))
    methods = choose_methods(changes.counts, lengths_of_blocks(elements))
    parts, changed = _padded(methods), int(changes.counts.sum())
    for method in np.unique(methods).tolist():
        if method != UNCHANGED:
            places, values = _section(changes, method, methods, elements)
            count = np.frombuffer(SECTION_HEADER.pack(values.size), np.uint8)
            parts += [count, *_padded(*places), *_padded(values.view(np.uint8))]
    nbytes = FRAME_HEADER.size + sum(part.size for part in parts)
    header = np.frombuffer(FRAME_HEADER.pack(nbytes, changed), np.uint8)
    return _Frame(changed, nbytes, (header, *parts))


def _section(changes: FrameChanges, method: int, methods: Bytes, elements: int) -> tuple[list[Bytes], Words]:
    """Encode the places and values of the blocks with this method."""
    runs = runs_of(methods, method, elements)
    if method == BITMAP:
        bits, values = changes.bitmap(runs)
        return [bits], values
    positions, values = changes.sparse(runs)
    shifts = shifts_of(runs)
    if shifts is not None:
        # The section counts without the blocks of other methods; the shift is found by the block in the frame.
        by_block = np.zeros(methods.size, np.int64)
        by_block[methods == method] = shifts
        positions = positions - by_block.take(positions >> LOG_BLOCK)
    return elias_fano.encode(positions, elements_in(runs), elias_fano.LOW_BITS[method - SPARSE]), values


def _padded(*parts: Bytes) -> list[Bytes]:
    """The parts, and the zeros that make their length a multiple of 8."""
    size = sum(part.size for part in parts)
    spare = aligned(size) - size
    return [*parts, np.zeros(spare, np.uint8)] if spare else [*parts]
