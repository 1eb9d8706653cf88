"""`Snapshot`: runs the steps that copy a rank's shards into memory, and reports its progress."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from typing import Any

import torch

from weightlane.ckpt_engines import WeightlaneError
from weightlane.ckpt_engines.runtime.daemon_threads import DaemonThreads
from weightlane.ckpt_engines.runtime.devices import HOST, runtime_of, usable_cpus

from ...version.tensor_spec import LocalShard
from .progress import Progress
from .steps import Milestone, PendingBlocks, copies

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
        is_cut: Whether elements depend on other ranks; see `weightlane.sync.send.agreement.magnitudes`.
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
        milestones = [Milestone(copy, copy.end, copy.end) for copy in copies(ordered)]
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
                milestone.step.run(memory, pending_blocks)
                queued.append((self.runtime.record_event(self._stream), milestone))
        for event, milestone in queued:
            event.synchronize()
            progress.advance(milestone.done_bytes, milestone.read)

    def _reached(self, memory: torch.Tensor, pending_blocks: PendingBlocks) -> Generator[Milestone, None, None]:
        """Run the steps, on several threads if torch itself uses one. Yields each milestone, in order, once it is reached."""
        if self._workers == 1 or torch.get_num_threads() > 1:
            for milestone in self._milestones:
                milestone.step.run(memory, pending_blocks)
                yield milestone
            return
        if self._threads is None:
            self._threads = DaemonThreads(self._workers, "weightlane-copy")
        running: deque[tuple[Milestone, Future[None]]] = deque()

        def run(batch: Sequence[Milestone]) -> None:
            for milestone in batch:
                milestone.step.run(memory, pending_blocks)

        try:
            for batch in _batches(self._milestones):
                running.append((batch[-1], self._threads.submit(run, batch)))
                if len(running) > self._workers:
                    first, ran = running.popleft()
                    ran.result()
                    yield first
            while running:
                first, ran = running.popleft()
                ran.result()
                yield first
        finally:
            # When this returns, no thread may read the shards or write to the memory any more.
            for _, ran in running:
                ran.cancel()
            wait([ran for _, ran in running])

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
