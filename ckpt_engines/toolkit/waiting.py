"""Bounded waits for libraries whose calls block or must be polled. Public in `toolkit`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from ..deadline import Deadline
from ..runtime.lifecycle import Lifecycle
from ..runtime.threads import call_in_thread

_T = TypeVar("_T")
_PAUSE_S = 0.001
"""Pause between two polls: short compared with the transfer of a bucket, and long enough to leave the core to others."""
_FIRST_POLLS_S, _FIRST_PAUSE_S = 0.002, 0.00002
"""Length of the first phase, and the shorter pauses in it: a copy within one device takes some ten microseconds."""


def run_bounded(
    function: Callable[[], _T], life: Lifecycle, deadline: Deadline, waiting_for: str, *, peer: str = ""
) -> _T:
    """Run a blocking `function` without a usable timeout in a daemon thread, and return its result or raise its error.

    At the deadline this raises `DeadlineExceededError`, and `ClosedError` when the half is closed, as happens when a peer dies.
    The thread then continues until `function` returns, so `function` must own every buffer that the library may still read or
    write, and must not touch the caller's memory.
    """
    call = call_in_thread(function, "weightlane-bounded-call")
    call.add_done_callback(lambda _: life.ring())
    while not call.done():
        life.wait({}, deadline.remaining_s)
        if not call.done():
            deadline.check(waiting_for, part=life.part, peer=peer)
    return call.result()


def poll_until(
    done: Callable[[], bool], life: Lifecycle, deadline: Deadline, waiting_for: str, *, peer: str = ""
) -> None:
    """Call `done` until it returns true: every 20 microseconds for the first 2 milliseconds, then every millisecond.

    Keeps no core busy, because trainer and rollout may share the cores. Raises `DeadlineExceededError` that names `peer`,
    `ClosedError` when the half is closed, as happens when a peer dies, and what `done` raises.
    """
    short_pauses_until = time.monotonic() + _FIRST_POLLS_S
    while not done():
        if time.monotonic() < short_pauses_until:
            life.wait({}, 0.0)
            time.sleep(_FIRST_PAUSE_S)
        else:
            life.wait({}, min(_PAUSE_S, deadline.remaining_s))
        deadline.check(waiting_for, part=life.part, peer=peer)
