"""Packing: from the snapshots of trainer ranks to buckets.

Every trainer rank copies only its own shards into one flat *snapshot* in the wire dtype. A `SnapshotSlice` has the places of
elements in a snapshot and in the stream. If the bytes of a bucket lie in a snapshot as in the stream, the bucket is sent from it
in place. Otherwise the bucket is filled from one snapshot, or from those of all ranks, so that no rank ever holds a large tensor
in full.
"""

from __future__ import annotations

import math
import operator
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from weightlane.ckpt_engines.runtime.tensor_bytes import copy_bytes

from .box import Box, boxes_of_run, cut, row_major_strides
from .manifest import Manifest
from .tensor_spec import INTEGERS, Shard, TensorSlice, raw_bytes


@dataclass(frozen=True, slots=True)
class SnapshotSlice:
    """The elements that a tensor of the stream and a shard in a snapshot have in common."""

    tensor: int
    """Index of the tensor in the stream."""
    box: Box
    """The slice of the tensor that the elements are."""
    shape: tuple[int, ...]
    """Shape of the tensor."""
    first: int
    """Offset of the first element in the snapshot, in elements."""
    strides: tuple[int, ...]
    """Strides in the snapshot, in elements."""
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.box.numel * self.dtype.itemsize

    @property
    def end(self) -> int:
        """One past the last byte in the snapshot."""
        return (self.first + _dot((size - 1 for size in self.box.shape), self.strides) + 1) * self.dtype.itemsize

    @property
    def stream_strides(self) -> tuple[int, ...]:
        """Strides in the stream, in elements."""
        return row_major_strides(self.shape)

    @property
    def first_in_tensor(self) -> int:
        """Offset of the first element in the tensor of the stream, in elements."""
        return _dot(self.box.starts, self.stream_strides)

    @property
    def is_parallel(self) -> bool:
        """Whether the elements lie at the same distances in the snapshot as in the stream."""
        sides = zip(self.box.shape, self.strides, self.stream_strides, strict=True)
        return all(size == 1 or here == there for size, here, there in sides)

    def view(self, snapshot: torch.Tensor) -> torch.Tensor:
        """The elements' bits, as a view of `snapshot` (1-D uint8) with the slice's shape."""
        return _strided(snapshot, self.dtype, self.first, self.box.shape, self.strides)

    def part(self, box: Box) -> SnapshotSlice:
        """The elements in `box`, which is in the slice."""
        return replace(self, box=box, first=self.first + _dot(box.within(self.box).starts, self.strides))

    def cut(self, most: int) -> Iterator[SnapshotSlice]:
        """Cut the slice into parts of at most `most` elements, in the order of the elements."""
        return map(self.part, cut(self.box, most))

    def within(self, low: int, high: int) -> Iterator[SnapshotSlice]:
        """The parts among the elements [`low`, `high`) of the tensor, counted in row-major order."""
        for run in boxes_of_run(self.shape, low, high - low):
            if (common := run.intersect(self.box)) is not None:
                yield self.part(common)


def snapshot_slices(
    shards: Sequence[Shard], places: Sequence[int], regions: Sequence[TensorSlice]
) -> list[SnapshotSlice]:
    """Intersect a rank's shards with the tensors of a stream.

    Args:
        shards: The rank's shards.
        places: First byte of each shard in the rank's snapshot, where the shard lies in row-major order.
        regions: For each tensor of the stream, the slice of a checkpoint tensor that it is.

    Returns:
        Slices in the order of `regions`.
    """
    by_name: dict[str, list[tuple[Shard, int]]] = defaultdict(list)
    for shard, place in zip(shards, places, strict=True):
        if shard.numel:
            by_name[shard.spec.name].append((shard, place))
    return [
        _slice(tensor, region.box, common, shard, place)
        for tensor, region in enumerate(regions)
        for shard, place in by_name.get(region.spec.name, ())
        if (common := region.box.intersect(shard.box)) is not None
    ]


def _slice(tensor: int, region: Box, common: Box, shard: Shard, place: int) -> SnapshotSlice:
    strides, dtype = row_major_strides(shard.box.shape), shard.spec.dtype
    first = place // dtype.itemsize + _dot(common.within(shard.box).starts, strides)
    return SnapshotSlice(tensor, common.within(region), region.shape, first, strides, dtype)


def _dot(index: Iterable[int], strides: tuple[int, ...]) -> int:
    return sum(map(operator.mul, index, strides))


def _strided(
    memory: torch.Tensor, dtype: torch.dtype, first: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> torch.Tensor:
    """A view of `memory` (1-D uint8) as integers of the size of `dtype`; `first` and `strides` are in elements."""
    flat = memory[: memory.numel() // dtype.itemsize * dtype.itemsize].view(INTEGERS[dtype.itemsize])
    return flat.as_strided(shape, strides, flat.storage_offset() + first)


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements in one window of the stream."""

    part: SnapshotSlice
    first: int
    """Offset of the first element in the stream, in elements."""
    packed: int
    """Offset of the first element in a buffer that has all pieces of the window back to back, in elements."""

    def in_window(self, payload: torch.Tensor, start: int) -> torch.Tensor:
        """The elements in `payload` (1-D uint8), the window that begins at byte `start` of the stream."""
        part = self.part
        first = self.first - start // part.dtype.itemsize
        return _strided(payload, part.dtype, first, part.box.shape, part.stream_strides)

    def in_packed(self, packed: torch.Tensor) -> torch.Tensor:
        """The elements in `packed` (1-D uint8), which has all pieces of the window."""
        shape = self.part.box.shape
        return _strided(packed, self.part.dtype, self.packed, shape, row_major_strides(shape))


@dataclass(frozen=True, slots=True)
class Window:
    """A rank's bytes in one window of the stream."""

    pieces: Sequence[Piece]
    nbytes: int
    """Bytes of all pieces."""
    packed_bytes: int
    """Length of a buffer that has all pieces back to back, each aligned for its dtype; a multiple of 8."""
    snapshot_end: int
    """One past the last byte of the snapshot that is needed."""
    shift: int | None
    """Offset in the snapshot minus offset in the stream, in bytes; None if it differs between the pieces."""


_KEPT_WINDOWS = 1 << 14
"""Limit for the windows that are kept for the next version, which bounds their memory."""
_LARGEST_ELEMENT = 8
"""Bytes of the largest elements."""


class CopyTable:
    """The copies between one rank's snapshot and the stream.

    Args:
        placed: The slices of the snapshot, each with the first byte of its tensor in the stream.
    """

    def __init__(self, placed: Iterable[tuple[SnapshotSlice, int]]) -> None:
        self._placed = sorted(placed, key=lambda each: (each[1], each[0].first_in_tensor))
        self._ends = [offset + math.prod(each.shape) * each.dtype.itemsize for each, offset in self._placed]
        self._windows: dict[tuple[int, int], Window] = {}

    @classmethod
    def of(cls, slices: Iterable[SnapshotSlice], layout: Manifest) -> CopyTable:
        """The table of a rank whose snapshot has these slices of the stream `layout`."""
        offsets = layout.offsets
        return cls((each, offsets[each.tensor]) for each in slices)

    @classmethod
    def run(cls, stream: int, nbytes: int) -> CopyTable:
        """The table of a rank whose first `nbytes` in memory lie at byte `stream` of the stream."""
        box = Box.whole((nbytes,))
        return cls([(SnapshotSlice(0, box, box.shape, 0, (1,), torch.uint8), stream)] if nbytes else [])

    def window(self, start: int, stop: int) -> Window:
        """The rank's bytes in the stream window [`start`, `stop`); cached. No element lies across a border of the window."""
        window = self._windows.get((start, stop))
        if window is None:
            if len(self._windows) >= _KEPT_WINDOWS:
                self._windows.clear()
            window = self._windows[start, stop] = self._window(start, stop)
        return window

    def _window(self, start: int, stop: int) -> Window:
        pieces: list[Piece] = []
        nbytes = packed = end = 0
        shifts: set[int | None] = set()
        for each, offset in self._placed[bisect_right(self._ends, start) :]:
            if offset >= stop:
                break
            width = each.dtype.itemsize
            numel = math.prod(each.shape)
            low, high = max(start - offset, 0) // width, min((stop - offset) // width, numel)
            for part in each.within(low, high):
                first = offset // width + part.first_in_tensor
                # Aligned by what is before, and not padded by itself: rank 0 may know as one slice what another rank holds in
                # several, and both must find the same elements at the same places.
                packed = -(-packed // width) * width
                pieces.append(Piece(part, first, packed // width))
                nbytes += part.nbytes
                packed += part.nbytes
                end = max(end, part.end)
                shifts.add((part.first - first) * width if part.is_parallel else None)
        packed = -(-packed // _LARGEST_ELEMENT) * _LARGEST_ELEMENT
        return Window(pieces, nbytes, packed, end, shifts.pop() if len(shifts) == 1 else None)

    def pack(self, snapshot: torch.Tensor, start: int, stop: int, payload: torch.Tensor) -> None:
        """Copy this rank's bytes of the window to their places in `payload` (uint8, as long as the window)."""
        for piece in self.window(start, stop).pieces:
            _copy(piece.in_window(payload, start), piece.part.view(snapshot))

    def gather(self, snapshot: torch.Tensor, start: int, stop: int, packed: torch.Tensor) -> None:
        """Copy this rank's bytes of the window into `packed` (uint8, `Window.packed_bytes` long)."""
        for piece in self.window(start, stop).pieces:
            _copy(piece.in_packed(packed), piece.part.view(snapshot))

    def scatter(self, packed: torch.Tensor, start: int, stop: int, payload: torch.Tensor) -> None:
        """Copy bytes that `gather` has written on another rank to their places in `payload`."""
        for piece in self.window(start, stop).pieces:
            _copy(piece.in_window(payload, start), piece.in_packed(packed))


def _copy(target: torch.Tensor, source: torch.Tensor) -> None:
    if target.is_contiguous() and source.is_contiguous():
        copy_bytes(raw_bytes(target), raw_bytes(source))
    else:
        target.copy_(source)
