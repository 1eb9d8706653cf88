"""The steps of which taking a snapshot consists: copies of shards, and what a step leaves for later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from weightlane.ckpt_engines.runtime.host_copies import copy_bytes

from ...codecs.quantised import QuantisationReport
from ...version.tensor_spec import LocalShard, raw_bytes
from .quantised_blocks import CutBlocks, Magnitudes

_CHUNK_BYTES = 64 << 20
"""What is copied, at most, before those who wait for it hear of it."""
_SMALL_BYTES = 256 << 10
"""Tensors up to this size are copied together: a call of its own costs as much as copying 30 KiB."""


@dataclass(slots=True)
class Leftovers:
    """What a snapshot leaves behind that is not in its memory; see `weightlane.sync.send.snapshot.quantised_snapshot`."""

    cuts: list[CutBlocks] = field(default_factory=list)
    """Elements whose scales depend on what other ranks hold, until these have said it."""
    magnitudes: list[Magnitudes] = field(default_factory=list)
    """How large they are."""
    error: QuantisationReport = field(default_factory=QuantisationReport)
    """What quantising did to a sample of the elements."""


class Step(Protocol):
    """A part of taking a snapshot."""

    def run(self, memory: torch.Tensor, remains: Leftovers) -> None:
        """Do it. Whatever is left for later is added to `remains`."""


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements to be copied by one call: a piece of a large shard, or small shards that lie back to back."""

    sources: list[torch.Tensor]
    """In the trainer's dtype; 1-D if they are contiguous."""
    start: int
    """First byte in the snapshot."""
    end: int
    dtype: torch.dtype

    def run(self, memory: torch.Tensor, remains: Leftovers) -> None:  # noqa: ARG002 - nothing is left
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


@dataclass(frozen=True, slots=True)
class Milestone:
    """A step, and how far the snapshot has come once all steps up to this one have run."""

    step: Step
    done_bytes: int
    """Everything before this byte is there."""
    read: int
    """How far shards have been read, see `Snapshot.ends`."""


def copies(ordered: Sequence[tuple[int, LocalShard]]) -> Iterator[Copy]:
    """The calls that copy shards to their places; `ordered` by place."""
    return _joined(_pieces(ordered))


def _pieces(ordered: Sequence[tuple[int, LocalShard]]) -> Iterator[Copy]:
    for place, shard in ordered:
        data, width = shard.data.detach(), shard.spec.dtype.itemsize
        if not data.is_contiguous():
            yield Copy([data], place, place + shard.nbytes, shard.spec.dtype)
            continue
        flat = data.view(-1)
        step = _CHUNK_BYTES // width
        for first in range(0, flat.numel(), step):
            piece = flat[first : first + step]
            start = place + first * width
            yield Copy([piece], start, start + piece.numel() * width, shard.spec.dtype)


def _joined(copies: Iterable[Copy]) -> Iterator[Copy]:
    group: list[Copy] = []
    for copy in copies:
        if group and not _fit(group[0], group[-1], copy):
            yield _one(group)
            group = []
        group.append(copy)
    if group:
        yield _one(group)


def _fit(first: Copy, last: Copy, following: Copy) -> bool:
    """Whether `following` can be copied in one call with those from `first` to `last`."""
    source, other = first.sources[0], following.sources[0]
    return (
        last.end == following.start
        and (first.dtype, source.dtype, source.device) == (following.dtype, other.dtype, other.device)
        and source.dim() == other.dim() == 1
        and max(first.end - first.start, following.end - following.start) <= _SMALL_BYTES
        and following.end - first.start <= _CHUNK_BYTES
    )


def _one(group: Sequence[Copy]) -> Copy:
    return Copy([copy.sources[0] for copy in group], group[0].start, group[-1].end, group[0].dtype)
