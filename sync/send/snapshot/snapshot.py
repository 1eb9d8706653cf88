"""`Snapshot`: copies a rank's shards into memory step by step, and reports its `Progress` to the threads that wait for bytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from weightlane.ckpt_engines import Deadline, WeightlaneError
from weightlane.ckpt_engines.runtime.cpus import usable_cpus
from weightlane.ckpt_engines.runtime.devices import HOST, runtime_of
from weightlane.ckpt_engines.runtime.tensor_bytes import copy_bytes
from weightlane.ckpt_engines.runtime.threads import DaemonThreads

from ...version.tensor_spec import LocalShard, raw_bytes
from .quantised_blocks import PendingBlocks


class Progress:
    """Counts the bytes of a snapshot that are final: [0, `done_bytes`). Thread-safe."""

    def __init__(self, what: str, part: str) -> None:
        self._what = what
        self._part = part
        self._changed = threading.Condition()
        self.done_bytes = 0
        self._read = 0
        self._began = self._moved = 0.0
        self.error: WeightlaneError | None = None
        """Why the snapshot has failed; None unless it has."""

    @property
    def seconds(self) -> float:
        """Seconds from the beginning of the snapshot until the newest report."""
        return self._moved - self._began

    def begin(self) -> None:
        """Report that the snapshot begins."""
        self._began = self._moved = time.perf_counter()

    def advance(self, done_bytes: int, read: int) -> None:
        """Report that every byte before `done_bytes` is final, and that shards have been read up to `read`."""
        with self._changed:
            self.done_bytes, self._read, self._moved = done_bytes, read, time.perf_counter()
            self._changed.notify_all()

    def fail(self, error: WeightlaneError) -> None:
        """Report that the snapshot has failed; the first error is kept."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def wait(self, until_bytes: int, deadline: Deadline) -> None:
        """Return when every byte before `until_bytes` is final.

        Raises `DeadlineExceededError`, or the error with which the snapshot failed.
        """
        self._wait(lambda: self.done_bytes >= until_bytes, deadline)

    def wait_read(self, until: int, deadline: Deadline) -> None:
        """Return when shards have been read up to `until`, so that their values before it may change. Raises as `wait`."""
        self._wait(lambda: self._read >= until, deadline)

    def _wait(self, reached: Callable[[], bool], deadline: Deadline) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self.error or reached(), deadline.remaining_s)
            if reached():
                return
            if self.error is not None:
                raise self.error
        raise deadline.error(self._what, part=self._part)


_CHUNK_BYTES = 64 << 20
"""Most bytes of one copy, so that waiting threads see progress within a large tensor."""
_SMALL_BYTES = 256 << 10
"""Shards up to this size are copied together, because a call costs as much as copying 30 KiB."""


@dataclass(frozen=True, slots=True)
class Milestone:
    """A step of taking a snapshot, and its progress once all steps up to this one have run."""

    step: Callable[[torch.Tensor, PendingBlocks], None]
    """Writes into the memory of the snapshot, and adds blocks that cannot be quantised yet."""
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
        """See `Milestone.step`."""
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
        and (source.dtype == first.dtype or first.dtype != torch.bool)  # `torch.cat` makes no booleans of numbers
        and max(first.end - first.start, following.end - following.start) <= _SMALL_BYTES
        and following.end - first.start <= _CHUNK_BYTES
    )


def _joined(group: Sequence[Copy]) -> Copy:
    return Copy([copy.sources[0] for copy in group], group[0].start, group[-1].end, group[0].dtype)


_BATCH_BYTES = 16 << 20
"""Least bytes of the batch of steps that a thread gets at a time: handing over a batch costs as much as copying 1 MiB."""
_MOST_THREADS = 2
"""Limit for copying threads. One core cannot saturate memory, two nearly can, and training needs the others."""


class Snapshot:
    """Runs the steps of a snapshot each time a version is published.

    Args:
        device: Device of the live shards; their storage must stay in place.
        milestones: The steps, in the order of the bytes that they write.
        nbytes: Size of the snapshot in bytes.
        ends: By name of a tensor, how far shards must have been read before it may change: in bytes or any other unit that grows.
        read_end: How far shards must have been read before all tensors may change, in the same unit.
        threads: Most threads that run steps concurrently on a CPU.
        is_cut: Whether elements depend on other ranks; see `weightlane.sync.send.rank_agreement.MAGNITUDES`.
    """

    def __init__(
        self,
        device: torch.device,
        milestones: Sequence[Milestone],
        nbytes: int,
        ends: Mapping[str, int],
        read_end: int,
        *,
        threads: int = 1,
        is_cut: bool = False,
    ) -> None:
        self.runtime = runtime_of(device)
        self.nbytes, self.ends, self.read_end, self.is_cut = nbytes, ends, read_end, is_cut
        self._milestones = milestones
        self._stream = self.runtime.stream_for(self)
        self._workers = 1 if self.runtime.has_streams else min(threads, usable_cpus())
        self._threads: DaemonThreads | None = None
        """Started by the first snapshot that needs them."""

    @classmethod
    def of(cls, shards: Sequence[LocalShard], offsets: Sequence[int]) -> Snapshot:
        """The snapshot that copies live shards; `offsets` are their first bytes in it, and the copies do not overlap."""
        ordered = sorted(zip(offsets, shards, strict=True), key=lambda pair: pair[0])
        ends: dict[str, int] = {}
        for offset, shard in ordered:
            ends[shard.spec.name] = max(ends.get(shard.spec.name, 0), offset + shard.nbytes)
        milestones = [Milestone(copy.run, copy.end, copy.end) for copy in copies(ordered)]
        nbytes = max(ends.values(), default=0)
        return cls(device_of(shards), milestones, nbytes, ends, nbytes, threads=_MOST_THREADS)

    def mark(self) -> Any:
        """Record an event after the work queued so far on the trainer's stream, for the copy to wait for; None on a CPU."""
        return self.runtime.record_event()

    @contextmanager
    def reading(self, after: Any) -> Iterator[None]:
        """Context in which this thread reads the shards as they are after the event of `mark`."""
        with self.runtime.on(self._stream):
            self.runtime.wait_for(self._stream, after)
            yield

    @torch.no_grad()
    def take(
        self, memory: torch.Tensor, after: Any, progress: Progress, pending_blocks: PendingBlocks | None = None
    ) -> None:
        """Copy every shard, as it is after the event of `mark`, into `memory` (uint8), and cast it in the same pass. Blocks.

        If a version cannot be quantised, only that version fails: parameters may change afterwards.
        """
        pending_blocks = pending_blocks or PendingBlocks()
        try:
            if self.runtime.has_streams:
                self._take_on_stream(memory, after, progress, pending_blocks)
            else:
                with closing(self._reached(memory, pending_blocks)) as milestones:
                    for milestone in milestones:
                        progress.advance(milestone.done_bytes, milestone.read)
        except WeightlaneError:
            progress.advance(progress.done_bytes, self.read_end)
            raise
        progress.advance(self.nbytes, self.read_end)

    def _take_on_stream(
        self, memory: torch.Tensor, after: Any, progress: Progress, pending_blocks: PendingBlocks
    ) -> None:
        queued: list[tuple[Any, Milestone]] = []
        with self.reading(after):
            for milestone in self._milestones:
                milestone.step(memory, pending_blocks)
                queued.append((self.runtime.record_event(self._stream), milestone))
        for event, milestone in queued:
            event.synchronize()
            progress.advance(milestone.done_bytes, milestone.read)

    def _reached(self, memory: torch.Tensor, pending_blocks: PendingBlocks) -> Generator[Milestone, None, None]:
        """Run the steps, on several threads if torch itself uses one. Yields each milestone, in order, once it is reached."""
        if self._workers == 1 or torch.get_num_threads() > 1:
            for milestone in self._milestones:
                milestone.step(memory, pending_blocks)
                yield milestone
            return
        if self._threads is None:
            self._threads = DaemonThreads(self._workers, "weightlane-copy")

        def run(batch: Sequence[Milestone]) -> None:
            for milestone in batch:
                milestone.step(memory, pending_blocks)

        # When this ends, no thread may read the shards or write to the memory any more.
        with closing(self._threads.in_order(run, _batches(self._milestones), lambda: self._workers + 1)) as ran:
            for batch, _ in ran:
                yield batch[-1]

    def close(self) -> None:
        """Let the threads end. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)


def device_of(shards: Sequence[LocalShard]) -> torch.device:
    """The device of the first shard that has elements; the CPU if none has."""
    return next((shard.data.device for shard in shards if shard.numel), HOST)


def _batches(milestones: Iterable[Milestone]) -> Iterator[list[Milestone]]:
    """Group milestones into batches, each of which one thread runs."""
    batch: list[Milestone] = []
    start = 0
    for milestone in milestones:
        batch.append(milestone)
        if milestone.done_bytes - start >= _BATCH_BYTES:
            yield batch
            batch, start = [], milestone.done_bytes
    if batch:
        yield batch
