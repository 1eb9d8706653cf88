"""Bounds on the calls of an engine, or of anybody else's code: for one that does not keep the deadline it was given."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from ..deadline import Deadline
from ..runtime.daemon_threads import DaemonThreads
from .receiver_link import ReceiverLink
from .sender_link import SenderLink

Half = SenderLink | ReceiverLink
T = TypeVar("T")
_log = logging.getLogger(__name__)

GRACE_S = 2.0
"""How much longer than an engine's call, which knows better what has happened, whoever waits for it does."""
_QUICK_S = 10.0
"""Most seconds of a call that has no deadline because it waits for nobody."""
HINT = "The engine does not keep its deadlines: `weightlane conformance` says which of them."


def result_of(call: Future[T], deadline: Deadline, waiting_for: str, part: str, hint: str = HINT) -> T:
    """Wait for `call`, which was given `deadline`, and return its result. Raises `DeadlineExceededError` if it has none."""
    try:
        return call.result(deadline.remaining_s + GRACE_S)
    except TimeoutError as error:
        if call.done():
            return call.result()
        raise deadline.error(waiting_for, part=part, hint=hint) from error


def address_of(half: Half, part: str) -> dict[str, Any]:
    """Where a half can be reached; `DeadlineExceededError` when it does not say so at once."""
    return _aside(lambda: dict(half.address()), Deadline.after(_QUICK_S), "the engine's address", part)


def close_all(halves: Iterable[Half], part: str) -> None:
    """Close halves, all at once. Never raises; what does not end is left to itself."""
    deadline = Deadline.after(_QUICK_S)
    for closing in [begun(half.close) for half in halves]:
        try:
            result_of(closing, deadline, "the engine to be closed", part)
        except Exception as error:  # noqa: BLE001 - a third party's, and the others are to be closed, too
            _log.warning("%s: the engine could not be closed: %s", part, error)


def _aside(call: Callable[[], T], deadline: Deadline, waiting_for: str, part: str) -> T:
    """Run `call` on a thread of its own and wait for it; the thread is left behind when the call does not end in time."""
    return result_of(begun(call), deadline, waiting_for, part)


def begun(call: Callable[[], T]) -> Future[T]:
    """Run `call` on a thread of its own; on this one where there are none any more: from Python 3.12 on, when a program ends."""
    threads = DaemonThreads(1, "weightlane-engine-call")
    try:
        return threads.submit(call)
    except RuntimeError:
        ended: Future[T] = Future()
        try:
            ended.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again where the result is asked for
            ended.set_exception(error)
        return ended
    finally:
        threads.shutdown()
