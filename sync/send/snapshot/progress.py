"""Progress of a snapshot: the thread that takes it reports final bytes, and other threads wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import Deadline, WeightlaneError


class Progress:
    """Counts the bytes of a snapshot that are final: [0, `done_bytes`). Thread-safe.

    Args:
        what: The snapshot, for error messages.
        part: The waiting participant, for error messages.
    """

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


@dataclass(frozen=True, slots=True)
class SourceBytes:
    """The bytes that a rank sends of one version: its snapshot, which may not be complete yet, or its segments of a delta.

    Attributes:
        memory: The bytes, 1-D uint8.
        progress: Progress of the snapshot; None if all bytes are final.
        deadline: Limit for all waits for bytes, and for sending.
    """

    memory: torch.Tensor
    progress: Progress | None
    deadline: Deadline

    def wait(self, until_bytes: int) -> None:
        """Return when every byte before `until_bytes` is final. Raises as `Progress.wait`."""
        if self.progress is not None:
            self.progress.wait(until_bytes, self.deadline)
