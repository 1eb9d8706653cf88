"""`OverlapClock`: measures how long generation and training work at the same time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class OverlapClock:
    """Adds up the wall time in which each activity is busy, and that in which at least two are.

    Args:
        now: A monotonic clock in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = now()
        self._changed = self._started
        self._busy: dict[str, int] = {}
        self._seconds: dict[str, float] = {}
        self._together = 0.0

    def restart(self) -> None:
        """Reset all sums. Busy activities stay busy."""
        self._started = self._changed = self._now()
        self._seconds.clear()
        self._together = 0.0

    def wall_s(self) -> float:
        """Seconds since the start."""
        return self._now() - self._started

    @contextmanager
    def busy(self, activity: str) -> Iterator[None]:
        """Mark `activity` as busy; several may nest or overlap."""
        self._settle()
        self._busy[activity] = self._busy.get(activity, 0) + 1
        try:
            yield
        finally:
            self._settle()
            self._busy[activity] -= 1

    def seconds(self, activity: str) -> float:
        """Seconds in which `activity` was busy."""
        self._settle()
        return self._seconds.get(activity, 0.0)

    def share_together(self) -> float:
        """Share of the wall time since the start in which at least two activities were busy."""
        self._settle()
        wall = self._changed - self._started
        return self._together / wall if wall > 0 else 0.0

    def _settle(self) -> None:
        now = self._now()
        passed, self._changed = now - self._changed, now
        active = [activity for activity, count in self._busy.items() if count > 0]
        for activity in active:
            self._seconds[activity] = self._seconds.get(activity, 0.0) + passed
        if len(active) > 1:
            self._together += passed
