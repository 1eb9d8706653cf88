"""The snapshot: a rank's shards in the wire dtype, copied while the next step already computes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from .progress import Progress
from .tensor_spec import LocalShard

_CHUNK_BYTES = 16 << 20
"""What is copied, at most, before those who wait for it hear of it."""
_SMALL_BYTES = 256 << 10
"""Tensors up to this size are copied together: a call of its own costs as much as copying 30 KiB."""


@dataclass(frozen=True, slots=True)
class _Copy:
    """Elements to be copied by one call: a piece of a large shard, or small shards that lie back to back."""

    sources: list[torch.Tensor]
    """1-D, in the trainer's dtype."""
    start: int
    """First byte in the snapshot."""
    end: int
    dtype: torch.dtype


class Snapshot:
    """Copies shards to their places.

    Args:
        shards: This rank's live shards; their storage must stay where it is.
        places: First byte of each in the snapshot, without overlap.
    """

    def __init__(self, shards: Sequence[LocalShard], places: Sequence[int]) -> None:
        source = next((shard.data.device for shard in shards if shard.numel), torch.device("cpu"))
        self._stream = torch.cuda.Stream(source) if source.type == "cuda" else None  # type: ignore[no-untyped-call]
        ordered = sorted(zip(places, shards, strict=True), key=lambda placed: placed[0])
        self._copies = list(_joined(_pieces(ordered)))
        self.ends = _ends(ordered)
        """One past the last byte of each tensor's shards, by its name."""
        self.nbytes = max(self.ends.values(), default=0)
        """One past the last byte of all."""

    @property
    def from_cuda(self) -> bool:
        """Whether the shards are on a GPU."""
        return self._stream is not None

    def mark(self) -> torch.cuda.Event | None:
        """Remember the work queued so far on the trainer's stream; the copy will wait for it. None without CUDA."""
        if self._stream is None:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._stream.device))
        return event

    @torch.no_grad()
    def take(self, memory: torch.Tensor, after: torch.cuda.Event | None, progress: Progress) -> None:
        """Copy every shard into `memory` (uint8), cast in the same pass. Blocks, and tells `progress` of what is there."""
        if self._stream is None:
            for copy in self._copies:
                _run(copy, memory)
                progress.advance(copy.end)
            progress.advance(self.nbytes)
            return
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            queued: list[tuple[torch.cuda.Event, int]] = []
            for copy in self._copies:
                _run(copy, memory)
                event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record(self._stream)
                queued.append((event, copy.end))
        for event, end in queued:
            event.synchronize()
            progress.advance(end)
        progress.advance(self.nbytes)


def _run(copy: _Copy, memory: torch.Tensor) -> None:
    into = memory[copy.start : copy.end].view(copy.dtype)
    if len(copy.sources) == 1:
        into.copy_(copy.sources[0].reshape(-1), non_blocking=True)
    elif copy.sources[0].device == into.device:
        torch.cat(copy.sources, out=into)
    else:
        into.copy_(torch.cat(copy.sources), non_blocking=True)


def _pieces(ordered: Sequence[tuple[int, LocalShard]]) -> Iterator[_Copy]:
    for place, shard in ordered:
        data, width = shard.data.detach(), shard.spec.dtype.itemsize
        if not data.is_contiguous():  # flattened when it is copied: a piece must look at the live storage
            yield _Copy([data], place, place + shard.nbytes, shard.spec.dtype)
            continue
        flat = data.view(-1)
        step = _CHUNK_BYTES // width
        for first in range(0, flat.numel(), step):
            piece = flat[first : first + step]
            start = place + first * width
            yield _Copy([piece], start, start + piece.numel() * width, shard.spec.dtype)


def _joined(copies: Iterable[_Copy]) -> Iterator[_Copy]:
    group: list[_Copy] = []
    for copy in copies:
        if group and not _fit(group[0], group[-1], copy):
            yield _one(group)
            group = []
        group.append(copy)
    if group:
        yield _one(group)


def _fit(first: _Copy, last: _Copy, following: _Copy) -> bool:
    """Whether `following` can be copied in one call with those from `first` to `last`."""
    source, other = first.sources[0], following.sources[0]
    return (
        last.end == following.start
        and (first.dtype, source.dtype, source.device) == (following.dtype, other.dtype, other.device)
        and source.dim() == other.dim() == 1
        and max(first.end - first.start, following.end - following.start) <= _SMALL_BYTES
        and following.end - first.start <= _CHUNK_BYTES
    )


def _one(group: Sequence[_Copy]) -> _Copy:
    return _Copy([copy.sources[0] for copy in group], group[0].start, group[-1].end, group[0].dtype)


def _ends(ordered: Sequence[tuple[int, LocalShard]]) -> dict[str, int]:
    ends: dict[str, int] = {}
    for place, shard in ordered:
        ends[shard.spec.name] = max(ends.get(shard.spec.name, 0), place + shard.nbytes)
    return ends
