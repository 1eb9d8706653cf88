"""Deadlines: the one way in which weightlane bounds a wait."""

from __future__ import annotations

import time
from dataclasses import dataclass
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
    """`time.monotonic` value, seconds."""

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The deadline `seconds` from now, ten years at most: the clocks of what waits by it cannot count further."""
        return cls(time.monotonic() + min(_LONGEST_S, seconds))

    def within(self, seconds: float) -> Deadline:
        """This deadline, or the point `seconds` from now if that comes first."""
        return Deadline(min(self.at, time.monotonic() + seconds))

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.at

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
