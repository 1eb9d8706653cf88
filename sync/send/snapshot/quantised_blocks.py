"""Blocks of the matrices that a rank quantises: complete in its shard, or divided between ranks, which must agree on a scale."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

import torch

from weightlane.ckpt_engines import ProtocolError

from ...codecs.quantised import QuantisationReport, block_fp8
from ...codecs.quantised.block_fp8 import BLOCK
from ...codecs.quantised.quantisation import QuantisedPair, scale_box, touched_blocks
from ...version.box import Box, row_major_strides
from ...version.tensor_spec import LocalShard

_SAMPLED_ROWS = 16
"""Rows of each step whose error is computed: enough for an estimate, at low cost, and within one row of blocks."""


@dataclass(frozen=True, slots=True)
class Magnitudes:
    """The largest magnitude per block, over some elements of a matrix."""

    name: str
    """The matrix's name in the checkpoint."""
    blocks: Box
    """The blocks that contain the elements."""
    values: torch.Tensor
    """float32 of the shape of `blocks`."""


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    """A rank's shard of a matrix, and the places of its elements and scales in the snapshot."""

    shard: LocalShard
    pair: QuantisedPair
    weight_offset: int
    """First byte of the elements."""
    scale_offset: int
    """First byte of the scales that this rank sends."""

    @property
    def name(self) -> str:
        """The matrix's name in the checkpoint."""
        return self.pair.weight.name

    @property
    def _own(self) -> Box:
        """The scales that this rank sends."""
        return scale_box(self.shard.box)

    def data(self, box: Box) -> torch.Tensor:
        """The current values of the elements in `box`."""
        return self.shard.data.detach()[box.within(self.shard.box).index]

    def magnitudes(self, box: Box, data: torch.Tensor) -> Magnitudes:
        """The largest magnitude per block of `data`, the elements in `box`."""
        values = block_fp8.magnitudes(data, at=box.starts, name=self.name)
        return Magnitudes(self.name, touched_blocks(box), values)

    def put(self, memory: torch.Tensor, box: Box, data: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        """Quantise `data`, the elements in `box`, into the snapshot, and copy the scales that this rank sends into it.

        `scales` has the scales of all blocks that `box` touches. Returns the quantised elements.
        """
        at, out = box.starts, _elements_of(memory, self.weight_offset, self.pair.weight.dtype, self.shard.box, box)
        direct = out if out.device == data.device else None
        quantised = block_fp8.quantise(data, scales, at=at, name=self.name, out=direct)
        if direct is None:
            out.copy_(quantised, non_blocking=True)
        if (mine := scale_box(box)).numel:
            touched = touched_blocks(box)
            into = _elements_of(memory, self.scale_offset, torch.float32, self._own, mine)
            into.copy_(scales[mine.within(touched).index], non_blocking=True)
        return quantised

    def first_byte(self, box: Box) -> int:
        """The first byte of the snapshot that `put` writes for `box`."""
        first = self.weight_offset + _number_in(self.shard.box, box) * self.pair.weight.dtype.itemsize
        mine = scale_box(box)
        if not mine.numel:
            return first
        return min(first, self.scale_offset + _number_in(self._own, mine) * self.pair.scales.dtype.itemsize)


@dataclass(frozen=True, slots=True)
class QuantiseStep:
    """The step of a snapshot that quantises complete blocks of a matrix, or copies this rank's parts of divided blocks."""

    matrix: QuantisedMatrix
    box: Box
    """The slice of the matrix that the elements are."""
    is_cut: bool

    def run(self, memory: torch.Tensor, pending_blocks: PendingBlocks) -> None:
        """See `Milestone.step`."""
        matrix, box = self.matrix, self.box
        data = matrix.data(box)
        magnitudes = matrix.magnitudes(box, data)
        if self.is_cut:
            pending_blocks.cuts.append((self, data.clone()))
            pending_blocks.magnitudes.append(magnitudes)
            return
        scales = block_fp8.scales_of(magnitudes.values)
        quantised = matrix.put(memory, box, data, scales)
        few = slice(0, _SAMPLED_ROWS)
        pending_blocks.error += block_fp8.error_of(data[few], quantised[few], scales[:1], at=box.starts)


@dataclass(slots=True)
class PendingBlocks:
    """Results of a snapshot that are not in its memory; see `weightlane.sync.send.snapshot.quantised_snapshot`."""

    cuts: list[tuple[QuantiseStep, torch.Tensor]] = field(default_factory=list)
    """Elements that are not quantised yet, because their scales depend on the magnitudes of other ranks: the step that copied
    them from the live parameters, and the copy."""
    magnitudes: list[Magnitudes] = field(default_factory=list)
    """The magnitudes of the blocks in `cuts`."""
    error: QuantisationReport = field(default_factory=QuantisationReport)
    """The quantisation error of a sample of the elements."""

    def quantise_cuts(self, magnitudes: Iterable[Magnitudes], memory: torch.Tensor) -> None:
        """Quantise the elements of `cuts` into the snapshot, with the magnitudes of all ranks. Raises `ProtocolError`."""
        largest = largest_magnitudes(magnitudes, [step.matrix for step, _ in self.cuts])
        for step, data in self.cuts:
            touched = touched_blocks(step.box)
            scales = block_fp8.scales_of(largest[step.matrix.name][touched.index].to(data.device))
            quantised = step.matrix.put(memory, step.box, data, scales)
            self.error += block_fp8.error_of(data, quantised, scales, at=step.box.starts)
        self.cuts.clear()  # if rows are divided, the cuts can be as large as the shards themselves


def largest_magnitudes(parts: Iterable[Magnitudes], matrices: Iterable[QuantisedMatrix]) -> dict[str, torch.Tensor]:
    """The largest magnitude in each block of the `matrices`, float32 of the scales' shape; 0 for blocks in no part.

    Raises `ProtocolError` for a part with blocks that its matrix does not have.
    """
    merged = {matrix.name: torch.zeros(matrix.pair.scales.shape, dtype=torch.float32) for matrix in matrices}
    for part in parts:
        if (whole := merged.get(part.name)) is None:
            continue
        if not part.blocks.fits(tuple(whole.shape)) or part.values.shape != part.blocks.shape:
            raise ProtocolError(f"ranks disagree about the shape of {part.name}.", part="block magnitudes")
        there = whole[part.blocks.index]
        torch.maximum(there, part.values.to(whole.device), out=there)
    return merged


def regions_of(box: Box, matrix: Sequence[int]) -> Iterator[tuple[Box, bool]]:
    """Cut a slice of a matrix of shape `matrix` at block borders. Yields regions, and whether their blocks are divided."""
    sides = zip(box.starts, box.stops, matrix, strict=True)
    rows, columns = (list(_runs(*side)) for side in sides)
    for (top, bottom, cut_above), (left, right, cut_beside) in product(rows, columns):
        yield Box((top, left), (bottom - top, right - left)), cut_above or cut_beside


def _runs(start: int, stop: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """Cut a range of indices into a partial block, complete blocks and a partial block. Yields start, stop, is partial."""
    first = min(stop, -(-start // BLOCK) * BLOCK)
    last = stop if stop == size else max(first, stop // BLOCK * BLOCK)
    for begin, end, is_part in ((start, first, True), (first, last, False), (last, stop, True)):
        if begin < end:
            yield begin, end, is_part


def _number_in(outer: Box, box: Box) -> int:
    """Number of the first element of `box` among those of `outer`."""
    strides = row_major_strides(outer.shape)
    return sum(start * stride for start, stride in zip(box.within(outer).starts, strides, strict=True))


def _elements_of(memory: torch.Tensor, offset: int, dtype: torch.dtype, outer: Box, box: Box) -> torch.Tensor:
    """The memory of the elements of `box`, if those of `outer` begin at byte `offset` of `memory`, 1-D uint8."""
    flat = memory[offset : offset + outer.numel * dtype.itemsize].view(dtype)
    return flat.view(outer.shape)[box.within(outer).index]
