"""`OverlapClock`: measures how long generation and training work at the same time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class OverlapClock:
    """Adds up the wall time in which at least two activities are busy."""

    def __init__(self) -> None:
        self._busy: Counter[str] = Counter()
        self.restart()

    def restart(self) -> None:
        """Reset all sums. Busy activities stay busy."""
        self._started = self._changed = time.perf_counter()
        self._together = 0.0

    def wall_s(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    @contextmanager
    def busy(self, activity: str) -> Iterator[None]:
        """Mark `activity` as busy; several may nest or overlap."""
        self._settle()
        self._busy[activity] += 1
        try:
            yield
        finally:
            self._settle()
            self._busy[activity] -= 1

    def share_together(self) -> float:
        """Share of the wall time since the start in which at least two activities were busy."""
        self._settle()
        wall = self._changed - self._started
        return self._together / wall if wall > 0 else 0.0

    def _settle(self) -> None:
        now = time.perf_counter()
        if sum(count > 0 for count in self._busy.values()) > 1:
            self._together += now - self._changed
        self._changed = now
