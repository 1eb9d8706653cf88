"""`Deadline`: the time by which a blocking call must have ended. Every wait of weightlane is bounded by one."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta

from .errors import DeadlineExceededError

_LONGEST_S = 10 * 365 * 86400.0
"""Ten years: the timers of the operating system and of torch cannot count much further."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point on this process's monotonic clock by which a blocking call must have ended.

    Every layer passes its deadline unchanged to the calls that it makes, so their waits share one budget and do not add up. A
    deadline is never sent to another process: messages carry the seconds left, and each side makes its own deadline.
    """

    at: float
    """Value of `clock` at the deadline, in seconds."""
    clock: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)
    """Returns the time in seconds. Only tests pass a clock of their own."""

    @classmethod
    def after(cls, seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        """Return the deadline `seconds` from now, ten years at most."""
        return cls(clock() + min(_LONGEST_S, seconds), clock)

    def within(self, seconds: float) -> Deadline:
        """Return this deadline, or the one `seconds` from now if that is earlier."""
        return Deadline(min(self.at, self.clock() + seconds), self.clock)

    @property
    def remaining_s(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at - self.clock())

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.clock() >= self.at

    def timedelta(self) -> timedelta:
        """Return the time left, at least one millisecond, for torch.distributed: some of its calls take zero for *no timeout*."""
        return timedelta(seconds=max(0.001, self.remaining_s))

    def check(self, waiting_for: str, *, part: str, peer: str = "", hint: str = "") -> None:
        """Raise `DeadlineExceededError` if the deadline has passed."""
        if self.expired:
            raise self.error(waiting_for, part=part, peer=peer, hint=hint)

    def error(self, waiting_for: str, *, part: str, peer: str = "", hint: str = "") -> DeadlineExceededError:
        """Return the error to raise when this deadline has passed while the caller waited for `waiting_for`."""
        return DeadlineExceededError(
            f"the deadline passed while waiting for {waiting_for}.",
            part=part,
            peer=peer,
            hint=hint or "Check that the peer is alive and not overloaded, or allow more time.",
        )
