"""The encoder: from two versions of a segment to the bytes that turn one into the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from weightlane.ckpt_engines import ConfigError

from . import cuda_kernels
from .integer_views import PART, Bytes, Positions, Words, integer_view, words_of
from .wire_format import BLOCK, BLOCK_HEADER, FORMAT, HEADER, LOG_BLOCK, MAGIC, encode_flips, encode_places, padded

_Mask = npt.NDArray[np.bool_]

_RAMP = np.arange(0, BLOCK, 8)
_PLAIN_FROM = 0.57
"""Share of changed 8-element words above which more than a tenth of the elements changed: plain ``nonzero`` is fastest."""
_ONE_STEP_FROM = 0.2
"""Share of changed 8-element words above which grouping the words no longer pays."""

_Changes = tuple[Positions, Words]
"""Positions of the changed elements of a block, ascending, and the flips of these."""


def positions_in(mask: _Mask) -> Positions:
    """Indices of the set entries of `mask`, ascending.

    numpy's ``nonzero`` reads every byte of the mask. Where few entries are set, that costs three times as much as the comparison.
    So the mask is searched as 64-bit words first, and these in groups of eight, and only groups with a set entry are opened.
    In an opened group about 13 % of the entries are set when 1 % of the elements changed; above 10 % ``nonzero`` takes its
    branchless path. So two steps are faster than one, and one step is faster than none.

    Args:
        mask: 1-D; the length is a multiple of 64 and at most `BLOCK`.
    """
    words: _Mask = mask.view(np.uint64) != 0
    share = np.count_nonzero(words) / max(words.size, 1)
    if share == 0:
        return np.empty(0, np.int64)
    if share > _PLAIN_FROM:
        return mask.nonzero()[0]
    if share > _ONE_STEP_FROM:
        at = words.nonzero()[0]
    else:
        pairs = words.view(np.uint64)
        at = _open(pairs, (pairs != 0).nonzero()[0])
    return _open(mask.view(np.uint64), at)


def _open(groups: npt.NDArray[np.uint64], at: Positions) -> Positions:
    """Indices of the set bytes in the eight-byte groups number `at`; overwrites `at`."""
    inside = groups.take(at).view(np.bool_).nonzero()[0]
    at <<= 3
    at -= _RAMP[: at.size]  # the k-th opened group begins at byte 8 k of `inside`
    inside += at.take(inside >> 3)
    return inside


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


class _Scratch(threading.local):
    """One mask per thread. It is kept because fresh memory costs more than the comparison."""

    @cached_property
    def mask(self) -> _Mask:
        return np.empty(BLOCK, np.bool_)


_SCRATCH = _Scratch()


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
    elements, itemsize = new.numel(), new.itemsize
    capacity = float("inf") if capacity_bytes is None else capacity_bytes
    changes_in: Callable[[int, int], _Changes]
    if new.device.type == "cpu":
        changes_in = _on_host(words_of(old), words_of(new))
    else:
        counted = cuda_kernels.count_changes(integer_view(old), integer_view(new))
        if counted.total > capacity:  # each takes a byte at least
            return TooDense(int(capacity), counted.total, 1.0)
        positions, flipped = counted.compact()
        changes_in = _on_device(positions.cpu().numpy(), words_of(flipped.cpu()))
    parts: list[Bytes] = []
    changed, total = 0, HEADER.size
    for start in range(0, elements, BLOCK):
        stop = min(start + BLOCK, elements)
        changes = changes_in(start, stop)
        block = _block(changes, stop - start)
        changed += changes[0].size
        total += sum(part.size for part in block)
        parts += block
        if total > capacity:
            return TooDense(int(capacity), total, stop / elements)
    header = HEADER.pack(MAGIC, FORMAT, itemsize, LOG_BLOCK, 0, elements, changed, total)
    return Encoded(elements, changed, total, (np.frombuffer(header, np.uint8), *parts))


def _on_host(old: Words, new: Words) -> Callable[[int, int], _Changes]:
    """Find the changes in elements [`start`, `stop`) in host memory."""

    def changes_in(start: int, stop: int) -> _Changes:
        before, after = old[start:stop], new[start:stop]
        mask = _SCRATCH.mask[: -(-before.size // 64) * 64]
        np.not_equal(before, after, out=mask[: before.size])
        mask[before.size :] = False
        positions = positions_in(mask)
        return positions, before.take(positions) ^ after.take(positions)

    return changes_in


def _on_device(positions: Positions, flipped: Words) -> Callable[[int, int], _Changes]:
    """Find the changes in elements [`start`, `stop`) among all, which a device has found."""

    def changes_in(start: int, stop: int) -> _Changes:
        low, high = np.searchsorted(positions, (start, stop)).tolist()
        return positions[low:high] - start, flipped[low:high]

    return changes_in


def _block(changes: _Changes, elements: int) -> list[Bytes]:
    positions, flipped = changes
    if not positions.size:
        return [np.frombuffer(BLOCK_HEADER.pack(0, 0, 0, 0, 0, 0), np.uint8)]
    gap_bytes, places = encode_places(positions, elements)
    flip_bytes, codes = encode_flips(flipped)
    code = codes[0] if len(codes) == 1 else np.concatenate(codes)
    header = BLOCK_HEADER.pack(positions.size, places.size, code.size, gap_bytes, flip_bytes, 0)
    return [np.frombuffer(header, np.uint8), *padded(places), *padded(code)]
