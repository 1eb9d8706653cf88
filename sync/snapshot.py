"""The snapshot: a rank's shards in the wire dtype, copied while the next step already computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from weightlane.ckpt_engines.devices import HOST, DeviceRuntime, runtime_of

from .codecs.quantised import QuantisationReport
from .daemon_threads import DaemonThreads
from .devices import usable_cpus
from .host_memory import copy_bytes
from .progress import Progress
from .tensor_spec import LocalShard, raw_bytes

if TYPE_CHECKING:
    from .quantised_snapshot import CutBlocks, Magnitudes

_CHUNK_BYTES = 64 << 20
"""What is copied, at most, before those who wait for it hear of it."""
_TURN_BYTES = 16 << 20
"""What a thread copies, at least, before it is told what to do next: to tell it costs as much as copying 1 MiB."""
_MOST_THREADS = 2
"""That copy. One core cannot saturate memory, two nearly can, and the training needs the others."""
_SMALL_BYTES = 256 << 10
"""Tensors up to this size are copied together: a call of its own costs as much as copying 30 KiB."""


@dataclass(slots=True)
class Remains:
    """What a snapshot leaves behind that is not in its memory; see `weightlane.sync.quantised_snapshot`."""

    cuts: list[CutBlocks] = field(default_factory=list)
    """Elements whose scales depend on what other ranks hold, until these have said it."""
    magnitudes: list[Magnitudes] = field(default_factory=list)
    """How large they are."""
    error: QuantisationReport = field(default_factory=QuantisationReport)
    """What quantising did to a sample of the elements."""


class Step(Protocol):
    """A part of taking a snapshot."""

    def run(self, memory: torch.Tensor, remains: Remains) -> None:
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

    def run(self, memory: torch.Tensor, remains: Remains) -> None:  # noqa: ARG002 - nothing is left
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


class Snapshot:
    """Copies shards to their places, on CPU with two threads.

    Args:
        shards: This rank's live shards; their storage must stay where it is.
        places: First byte of each in the snapshot, without overlap.
    """

    def __init__(self, shards: Sequence[LocalShard], places: Sequence[int]) -> None:
        self.runtime = runtime_of_shards(shards)
        """Of the device on which the shards are."""
        self._stream = self.runtime.new_stream()
        ordered = sorted(zip(places, shards, strict=True), key=lambda placed: placed[0])
        self._milestones = [Milestone(copy, copy.end, copy.end) for copy in copies(ordered)]
        self.ends = _ends(ordered)
        """How far must have been read before a tensor may change, by its name; here one past the last byte of its shards."""
        self.read_end = max(self.ends.values(), default=0)
        """How far, before all may."""
        self.nbytes = self.read_end
        """One past the last byte of all."""
        self._workers = 1 if self.runtime.has_streams else min(_MOST_THREADS, usable_cpus())
        self._threads: DaemonThreads | None = None
        """There from the first time on that they are needed."""
        self.is_cut = False
        """Whether other ranks must speak before it is complete; see `weightlane.sync.magnitudes`."""

    def mark(self) -> Any:
        """An event behind the work queued so far on the trainer's stream, for which the copy will wait; None on a CPU."""
        return self.runtime.recorded()

    @contextmanager
    def reading(self, after: Any) -> Iterator[None]:
        """Inside, what is read of the shards on this thread is what they are after `mark`."""
        with self.runtime.on(self._stream):
            self.runtime.wait_for(self._stream, after)
            yield

    @torch.no_grad()
    def take(
        self,
        memory: torch.Tensor,
        after: Any,
        progress: Progress,
        remains: Remains | None = None,
    ) -> None:
        """Copy every shard into `memory` (uint8), cast in the same pass. Blocks, and tells `progress` of what is there."""
        remains = remains or Remains()
        if not self.runtime.has_streams:
            with closing(self._reached(memory, remains)) as milestones:
                for milestone in milestones:
                    self._tell(milestone.done_bytes, milestone.read, progress)
        else:
            queued: list[tuple[Any, Milestone]] = []
            with self.reading(after):
                for milestone in self._milestones:
                    milestone.step.run(memory, remains)
                    queued.append((self.runtime.recorded(self._stream), milestone))
            for event, milestone in queued:
                event.synchronize()
                self._tell(milestone.done_bytes, milestone.read, progress)
        self._tell(self.nbytes, self.read_end, progress)

    def _reached(self, memory: torch.Tensor, remains: Remains) -> Generator[Milestone, None, None]:
        """Milestones in turn, when they are reached; steps run beside each other where torch itself uses one thread."""
        if self._workers == 1 or torch.get_num_threads() > 1:
            for milestone in self._milestones:
                milestone.step.run(memory, remains)
                yield milestone
            return
        if self._threads is None:
            self._threads = DaemonThreads(self._workers, "weightlane-copy")
        begun: deque[tuple[Milestone, Future[None]]] = deque()

        def run(steps: Sequence[Step]) -> None:
            for step in steps:
                step.run(memory, remains)

        try:
            for turn in _turns(self._milestones):
                steps = [milestone.step for milestone in turn]
                begun.append((turn[-1], self._threads.submit(run, steps)))
                if len(begun) > self._workers:
                    first, ran = begun.popleft()
                    ran.result()
                    yield first
            while begun:
                first, ran = begun.popleft()
                ran.result()
                yield first
        finally:
            # Nobody may read the shards, or write to the memory, any more when this returns.
            for _, ran in begun:
                ran.cancel()
            wait([ran for _, ran in begun])

    def close(self) -> None:
        """Let the threads end. Idempotent."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)

    def _tell(self, done_bytes: int, read: int, progress: Progress) -> None:  # noqa: ARG002 - the same here
        progress.advance(done_bytes)


def runtime_of_shards(shards: Sequence[LocalShard]) -> DeviceRuntime:
    """Of the device on which the shards are."""
    return runtime_of(next((shard.data.device for shard in shards if shard.numel), HOST))


def copies(ordered: Sequence[tuple[int, LocalShard]]) -> Iterator[Copy]:
    """The calls that copy shards to their places; `ordered` by place."""
    return _joined(_pieces(ordered))


def _turns(milestones: Iterable[Milestone]) -> Iterator[list[Milestone]]:
    """Those that one thread reaches before it hears what to do next."""
    turn: list[Milestone] = []
    start = 0
    for milestone in milestones:
        turn.append(milestone)
        if milestone.done_bytes - start >= _TURN_BYTES:
            yield turn
            turn, start = [], milestone.done_bytes
    if turn:
        yield turn


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


def _ends(ordered: Sequence[tuple[int, LocalShard]]) -> dict[str, int]:
    ends: dict[str, int] = {}
    for place, shard in ordered:
        ends[shard.spec.name] = max(ends.get(shard.spec.name, 0), place + shard.nbytes)
    return ends
