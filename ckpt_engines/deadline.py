"""Deadlines: the one way in which weightlane bounds a wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from .errors import DeadlineExceededError

_LONGEST_S = 10 * 365 * 86400.0


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on this process's monotonic clock by which a blocking call must have ended.

    A deadline is handed down unchanged through every layer, so the waits below share one budget instead of adding theirs
    up. It never crosses a process: messages carry the seconds left and each side starts its own.
    """

    at: float
    """A value of `clock`, seconds."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    """Tells the time in seconds. Tests pass a clock that they move; everybody else leaves the process's monotonic one."""

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """The deadline `seconds` from now, ten years at most: the timers that wait by it cannot count further."""
        return cls(clock() + min(_LONGEST_S, seconds), clock)

    def within(self, seconds: float) -> Deadline:
        """This deadline, or the point `seconds` from now if that comes first."""
        return Deadline(min(self.at, self.clock() + seconds), self.clock)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - self.clock())

    @property
    def expired(self) -> bool:
        """Whether the time is up."""
        return self.clock() >= self.at

    def timedelta(self) -> timedelta:
        """The time left for torch.distributed calls, at least one millisecond: zero means *no timeout* to some of them."""
        return timedelta(seconds=max(0.001, self.remaining_s))

    def check(self, waiting_for: str, *, part: str, peer: str = "", hint: str = "") -> None:
        """Raise `DeadlineExceededError` if the time is up."""
        if self.expired:
            raise self.error(waiting_for, part=part, peer=peer, hint=hint)

    def error(self, waiting_for: str, *, part: str, peer: str = "", hint: str = "") -> DeadlineExceededError:
        """The error to raise when this deadline passed while waiting for `waiting_for`."""
        return DeadlineExceededError(
            f"the deadline passed while waiting for {waiting_for}.",
            part=part,
            peer=peer,
            hint=hint or "Check that the peer is alive and not overloaded, or allow more time.",
        )
