"""How tests wait: until something has happened, and never for a time that a busy machine could miss."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG_S = 600.0
"""Seconds after which whatever a test waits for counts as hanging. Nothing that works comes near it on a busy machine.

Also the deadline of every call that a test expects to succeed. A call that a test expects to be ended by an event, and not by
its deadline, gets `NEVER_S`: it then hangs, and fails by `HANG_S`, where the event does not end it.
"""
NEVER_S = 100 * HANG_S
"""A deadline in seconds that no test lives to see."""


def wait_until(reached: Callable[[], bool], what: str, within_s: float = HANG_S, poll_s: float = 0.01) -> None:
    """Poll until `reached()`; an AssertionError that names `what` when it never is."""
    end = time.monotonic() + within_s
    while not reached():
        assert time.monotonic() < end, f"no {what} within {within_s} s"
        time.sleep(poll_s)


class MovableClock:
    """A clock for `Deadline` that stands still until the test moves it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let so many seconds pass."""
        self.now_s += seconds
