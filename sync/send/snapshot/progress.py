"""How much of a snapshot is there: what the taking thread reports, and what others wait for."""

from __future__ import annotations

import threading
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
        self.error: WeightlaneError | None = None
        """Why nothing more comes; None while more does."""

    def advance(self, done_bytes: int, read: int) -> None:
        """Report that every byte before `done_bytes` is final, and that shards have been read up to `read`."""
        with self._changed:
            self.done_bytes, self._read = done_bytes, read
            self._changed.notify_all()

    def fail(self, error: WeightlaneError) -> None:
        """Report that nothing more comes; the first error counts."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def wait(self, until_bytes: int, deadline: Deadline) -> None:
        """Return when every byte before `until_bytes` is final.

        Raises `DeadlineExceededError`, or the error that made the snapshot fail.
        """
        self._wait(lambda: self.done_bytes >= until_bytes, deadline)

    def wait_read(self, until: int, deadline: Deadline) -> None:
        """Return when shards have been read up to `until`, so that they may change there. Raises as `wait`."""
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
    """The bytes that a rank sends of one version: its snapshot, perhaps not complete yet, or its segments of a delta.

    Attributes:
        memory: 1-D uint8.
        progress: The snapshot's; None if all bytes are there.
        deadline: Limits all waits for bytes, and the sending.
    """

    memory: torch.Tensor
    progress: Progress | None
    deadline: Deadline

    def wait(self, until_bytes: int) -> None:
        """Return when every byte before `until_bytes` is there. Raises as `Progress.wait`."""
        if self.progress is not None:
            self.progress.wait(until_bytes, self.deadline)
