"""Bounded waits for libraries whose calls block or must be polled. Public in `toolkit`."""

from __future__ import annotations

import select
import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from ._channel import Channel
from ._lifecycle import Lifecycle
from .deadline import Deadline
from .errors import DeadlineExceededError, PeerLostError, TransportError

_T = TypeVar("_T")
_PAUSE_S = 0.001
_CULPRIT_WAIT_S = 0.3


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
    function: Callable[[], _T],
    life: Lifecycle,
    deadline: Deadline,
    waiting_for: str,
    *,
    watch: Mapping[str, Channel] | None = None,
) -> _T:
    """Call a blocking `function` that has no usable timeout; return or raise what it does, or end by the deadline.

    It runs in a daemon thread. When the deadline passes, the half is closed, or a peer in `watch` is gone or says something,
    this raises, and the thread is left behind until the call returns by itself: so `function` must own every buffer that
    the library may still read or write, and must not touch the caller's memory.
    """
    watched = watch or {}
    call = _Call(function, life.ring)
    while not call.done:
        ready = life.wait(_interest(watched), deadline.remaining_s)
        if call.done:
            break
        _check_peers(watched, ready, waiting_for)
        deadline.check(waiting_for, part=life.part, peer=", ".join(watched))
    if call.error is not None:
        raise call.error
    return call.value


def poll_until(
    done: Callable[[], bool],
    life: Lifecycle,
    deadline: Deadline,
    waiting_for: str,
    *,
    peer: str = "",
    watch: Mapping[str, Channel] | None = None,
) -> None:
    """Ask `done` every millisecond until it says yes, for libraries that tell of an end only when asked.

    Keeps no core busy: trainer and rollout may share them. Raises `PeerLostError` as soon as a peer in `watch` is gone or says
    something out of turn, `DeadlineExceededError` that names `peer` or those in `watch`, `ClosedError`, and what `done` raises.
    """
    watched = watch or {}
    while not done():
        _check_peers(watched, life.wait(_interest(watched), min(_PAUSE_S, deadline.remaining_s)), waiting_for)
        deadline.check(waiting_for, part=life.part, peer=peer or ", ".join(watched))


def blame(error: TransportError, watch: Mapping[str, Channel]) -> TransportError:
    """What to raise when a library reports `error`: that a peer in `watch` is gone, if one is, else `error` itself.

    The library often notices a death first but cannot say whose it was. Waits 0.3 seconds at most for a peer to hang up.
    """
    if isinstance(error, PeerLostError) or not watch:
        return error
    life = next(iter(watch.values())).life
    try:
        poll_until(lambda: False, life, Deadline.after(_CULPRIT_WAIT_S), "the peer to hang up", watch=watch)
    except PeerLostError as loss:
        return loss
    except DeadlineExceededError:
        pass
    return error


def _interest(watched: Mapping[str, Channel]) -> dict[int, int]:
    return {channel.fileno(): select.POLLIN for channel in watched.values()}


def _check_peers(watched: Mapping[str, Channel], ready: set[int], waiting_for: str) -> None:
    for channel in watched.values():
        if channel.fileno() in ready:
            raise channel.lost(f"while waiting for {waiting_for}")
