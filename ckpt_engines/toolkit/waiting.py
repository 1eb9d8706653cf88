"""Bounded waits for libraries whose calls block or must be polled. Public in `toolkit`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ..deadline import Deadline
from ..runtime.lifecycle import Lifecycle

_T = TypeVar("_T")
_PAUSE_S = 0.001
_CLOSELY_S, _CLOSE_PAUSE_S = 0.002, 0.00002
"""A copy within one device takes some ten microseconds."""


class _Call(Generic[_T]):
    """A function that runs in a thread of its own."""

    def __init__(self, function: Callable[[], _T], finished: Callable[[], None]) -> None:
        self._function = function
        self._finished = finished
        self.done = False
        self.error: BaseException | None = None
        self.value: _T
        threading.Thread(target=self._run, name="weightlane-bounded-call", daemon=True).start()

    def _run(self) -> None:
        try:
            self.value = self._function()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self.error = error
        self.done = True
        self._finished()


def run_bounded(
    function: Callable[[], _T], life: Lifecycle, deadline: Deadline, waiting_for: str, *, peer: str = ""
) -> _T:
    """Call a blocking `function` that has no usable timeout; return or raise what it does, or end by the deadline.

    It runs in a daemon thread. When the deadline passes, or the half is closed, which is what happens when a peer dies, this
    raises, and the thread is left behind until the call returns by itself: so `function` must own every buffer that the library
    may still read or write, and must not touch the caller's memory.
    """
    call = _Call(function, life.ring)
    while not call.done:
        life.wait({}, deadline.remaining_s)
        if not call.done:
            deadline.check(waiting_for, part=life.part, peer=peer)
    if call.error is not None:
        raise call.error
    return call.value


def poll_until(
    done: Callable[[], bool], life: Lifecycle, deadline: Deadline, waiting_for: str, *, peer: str = ""
) -> None:
    """Ask `done` until it says yes, for libraries that tell of an end only when asked: closely at first, then every millisecond.

    Keeps no core busy: trainer and rollout may share them. Raises `DeadlineExceededError` that names `peer`, `ClosedError` when
    the half is closed, which is what happens when a peer dies, and what `done` raises.
    """
    closely_until = time.monotonic() + _CLOSELY_S
    while not done():
        if time.monotonic() < closely_until:
            life.wait({}, 0.0)
            time.sleep(_CLOSE_PAUSE_S)
        else:
            life.wait({}, min(_PAUSE_S, deadline.remaining_s))
        deadline.check(waiting_for, part=life.part, peer=peer)
