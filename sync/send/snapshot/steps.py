"""The steps of taking a snapshot: copies of shards, and the blocks that are left to be quantised later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from weightlane.ckpt_engines.runtime.host_copies import copy_bytes

from ...codecs.quantised import QuantisationReport
from ...version.tensor_spec import LocalShard, raw_bytes
from .quantised_blocks import CutBlocks, Magnitudes, largest_magnitudes

_CHUNK_BYTES = 64 << 20
"""Most bytes of one copy, so that waiting threads see progress within a large tensor."""
_SMALL_BYTES = 256 << 10
"""Shards up to this size are copied together, because a call costs as much as copying 30 KiB."""


@dataclass(slots=True)
class PendingBlocks:
    """Results of a snapshot that are not in its memory; see `weightlane.sync.send.snapshot.quantised_snapshot`."""

    cuts: list[CutBlocks] = field(default_factory=list)
    """Elements that are not quantised yet, because their scales depend on the magnitudes of other ranks."""
    magnitudes: list[Magnitudes] = field(default_factory=list)
    """The magnitudes of the blocks in `cuts`."""
    error: QuantisationReport = field(default_factory=QuantisationReport)
    """The quantisation error of a sample of the elements."""

    def quantise_cuts(self, magnitudes: Iterable[Magnitudes], memory: torch.Tensor) -> None:
        """Quantise the elements of `cuts` into the snapshot, with the magnitudes of all ranks. Raises `ProtocolError`."""
        largest = largest_magnitudes(magnitudes, self.cuts)
        for cut in self.cuts:
            self.error += cut.quantise(largest[cut.matrix.name], memory)
        self.cuts.clear()  # if rows are divided, the cuts can be as large as the shards themselves


class Step(Protocol):
    """A part of taking a snapshot."""

    def run(self, memory: torch.Tensor, pending_blocks: PendingBlocks) -> None:
        """Write into `memory`, and add blocks that cannot be quantised yet to `pending_blocks`."""


@dataclass(frozen=True, slots=True)
class Milestone:
    """A step, and the progress of the snapshot once all steps up to this one have run."""

    step: Step
    done_bytes: int
    """Every byte before this one is final."""
    read: int
    """Shards have been read up to here; see `Snapshot.ends`."""


@dataclass(frozen=True, slots=True)
class Copy:
    """One call that copies a part of a large shard, or small shards that lie back to back."""

    sources: list[torch.Tensor]
    """Tensors in the trainer's dtype; 1-D if they are contiguous."""
    start: int
    """First byte in the snapshot."""
    end: int
    dtype: torch.dtype

    def run(self, memory: torch.Tensor, pending_blocks: PendingBlocks) -> None:  # noqa: ARG002 - nothing is left
        """See `Step`."""
        room = memory[self.start : self.end]
        into = room.view(self.dtype)
        if len(self.sources) == 1:
            source = self.sources[0]
            if source.is_cpu and room.is_cpu and source.dtype == self.dtype and source.is_contiguous():
                copy_bytes(room, raw_bytes(source))
            else:
                into.view(source.shape).copy_(source, non_blocking=True)
        elif self.sources[0].device == into.device:
            torch.cat(self.sources, out=into)
        else:
            into.copy_(torch.cat(self.sources), non_blocking=True)


def copies(ordered: Sequence[tuple[int, LocalShard]]) -> Iterator[Copy]:
    """The copies of shards into the snapshot. `ordered` has their first bytes there, ascending, and the shards."""
    group: list[Copy] = []
    for copy in _chunks(ordered):
        if group and not _fit(group[0], group[-1], copy):
            yield _joined(group)
            group = []
        group.append(copy)
    if group:
        yield _joined(group)


def _chunks(ordered: Iterable[tuple[int, LocalShard]]) -> Iterator[Copy]:
    for offset, shard in ordered:
        data, width = shard.data.detach(), shard.spec.dtype.itemsize
        if not data.is_contiguous():
            yield Copy([data], offset, offset + shard.nbytes, shard.spec.dtype)
            continue
        flat = data.view(-1)
        step = _CHUNK_BYTES // width
        for first in range(0, flat.numel(), step):
            chunk = flat[first : first + step]
            start = offset + first * width
            yield Copy([chunk], start, start + chunk.numel() * width, shard.spec.dtype)


def _fit(first: Copy, last: Copy, following: Copy) -> bool:
    """Whether one call can copy `following` together with the copies from `first` to `last`."""
    source, other = first.sources[0], following.sources[0]
    return (
        last.end == following.start
        and (first.dtype, source.dtype, source.device) == (following.dtype, other.dtype, other.device)
        and source.dim() == other.dim() == 1
        and max(first.end - first.start, following.end - following.start) <= _SMALL_BYTES
        and following.end - first.start <= _CHUNK_BYTES
    )


def _joined(group: Sequence[Copy]) -> Copy:
    return Copy([copy.sources[0] for copy in group], group[0].start, group[-1].end, group[0].dtype)
