"""How far a snapshot has come, for those who wait for a part of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from weightlane.ckpt_engines import Deadline, WeightlaneError


class Progress:
    """Bytes [0, `done_bytes`) of a buffer are what they are going to be. Thread-safe.

    Args:
        what: What is under way, for error messages.
        part: Who waits, for error messages.
    """

    def __init__(self, what: str, part: str) -> None:
        self._what = what
        self._part = part
        self._changed = threading.Condition()
        self._error: WeightlaneError | None = None
        self.done_bytes = 0
        self._read = 0

    def advance(self, done_bytes: int, read: int | None = None) -> None:
        """Everything before byte `done_bytes` is there, and what it is made of has been read up to `read`, or as far."""
        with self._changed:
            self.done_bytes = done_bytes
            self._read = done_bytes if read is None else read
            self._changed.notify_all()

    def fail(self, error: WeightlaneError) -> None:
        """Nothing more will come; the first error counts."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def error(self) -> WeightlaneError | None:
        """Why nothing more will come, if so."""
        return self._error

    def wait(self, until_bytes: int, deadline: Deadline) -> None:
        """Return when everything before byte `until_bytes` is there.

        Raises `DeadlineExceededError`, or what made the snapshot fail.
        """
        self._wait(lambda: self.done_bytes >= until_bytes, deadline)

    def wait_read(self, until: int, deadline: Deadline) -> None:
        """Return when what the buffer is made of has been read up to `until`, and may change. Raises as `wait`."""
        self._wait(lambda: self._read >= until, deadline)

    def _wait(self, reached: Callable[[], bool], deadline: Deadline) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._error or reached(), deadline.remaining_s)
            if reached():
                return
            if self._error is not None:
                raise self._error
        raise deadline.error(self._what, part=self._part)
