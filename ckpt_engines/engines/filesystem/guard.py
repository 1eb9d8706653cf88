"""`Guard`: the deadline of a file operation, and the half whose closing interrupts it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ...errors import ClosedError, DeadlineExceededError
from ...waits import Deadline, Lifecycle, run_bounded

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Guard:
    """The deadline of a file operation, and the lifecycle whose closing interrupts it."""

    life: Lifecycle
    deadline: Deadline
    peer: str = ""
    """The participant that the operation waits for, for error messages."""

    def check(self, waiting_for: str) -> None:
        """Raise `DeadlineExceededError` or `ClosedError` when it is time to stop."""
        if self.life.closed:
            raise ClosedError("it was closed while a call was running.", part=self.life.part)
        if self.deadline.expired:
            raise self._too_late(waiting_for)

    def run(self, operation: Callable[[], _T], waiting_for: str) -> _T:
        """Call an `operation` that cannot be interrupted, in a thread that is left behind when it is time to stop."""
        try:
            return run_bounded(operation, self.life, self.deadline, waiting_for)
        except DeadlineExceededError as error:
            raise self._too_late(waiting_for) from error

    def sleep(self, seconds: float) -> None:
        """Pause, but not beyond the deadline. Raises `ClosedError` as soon as the half is closed."""
        end = self.deadline.within(seconds)
        while not end.expired:  # the `ring` of an earlier remote operation may end a wait early
            self.life.wait({}, end.remaining_s)

    def _too_late(self, waiting_for: str) -> DeadlineExceededError:
        hint = "Check the file system, and that the sender is alive; or allow more time."
        return self.deadline.error(waiting_for, part=self.life.part, peer=self.peer, hint=hint)


@contextlib.contextmanager
def standalone_guard(part: str, deadline: Deadline) -> Iterator[Guard]:
    """Yield a guard for work outside of a half, or of a half that is already closed."""
    life = Lifecycle(part, lambda: None)
    try:
        yield Guard(life, deadline)
    finally:
        life.close()
