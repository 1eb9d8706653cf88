"""The snapshot: a rank's shards in the wire dtype, copied while the next step already computes."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import closing, contextmanager
from typing import Any

import torch

from weightlane.ckpt_engines.runtime.daemon_threads import DaemonThreads
from weightlane.ckpt_engines.runtime.devices import HOST, DeviceRuntime, runtime_of, usable_cpus

from ...version.tensor_spec import LocalShard
from .progress import Progress
from .steps import Leftovers, Milestone, Step, copies

_TURN_BYTES = 16 << 20
"""What a thread copies, at least, before it is told what to do next: to tell it costs as much as copying 1 MiB."""
_MOST_THREADS = 2
"""That copy. One core cannot saturate memory, two nearly can, and the training needs the others."""


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
        """Whether other ranks must speak before it is complete; see `weightlane.sync.send.agreement.magnitudes`."""

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
        remains: Leftovers | None = None,
    ) -> None:
        """Copy every shard into `memory` (uint8), cast in the same pass. Blocks, and tells `progress` of what is there."""
        remains = remains or Leftovers()
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

    def _reached(self, memory: torch.Tensor, remains: Leftovers) -> Generator[Milestone, None, None]:
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


def _ends(ordered: Sequence[tuple[int, LocalShard]]) -> dict[str, int]:
    ends: dict[str, int] = {}
    for place, shard in ordered:
        ends[shard.spec.name] = max(ends.get(shard.spec.name, 0), place + shard.nbytes)
    return ends
