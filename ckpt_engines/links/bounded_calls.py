"""Bounds on calls of an engine, or of other code that might not keep its deadline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from ..deadline import Deadline
from ..runtime.threads import DaemonThreads
from .sides import ReceiverLink, SenderLink

T = TypeVar("T")
_log = logging.getLogger(__name__)

GRACE_S = 2.0
"""Seconds that the caller waits beyond the call's own deadline: the engine's error says more than the caller's."""
_QUICK_S = 10.0
"""Longest time for a call that has no deadline because it waits for no peer."""
HINT = "The engine does not keep its deadlines: `weightlane conformance` says which of them."


def result_of(call: Future[T], deadline: Deadline, waiting_for: str, part: str, hint: str = HINT) -> T:
    """Wait for `call`, which has the same `deadline`, and return its result or raise its error.

    Raises `DeadlineExceededError` when the call has not ended `GRACE_S` seconds after the deadline.
    """
    try:
        return call.result(deadline.remaining_s + GRACE_S)
    except TimeoutError as error:
        if call.done():  # just now, or the TimeoutError is the call's own
            return call.result()
        raise deadline.error(waiting_for, part=part, hint=hint) from error


def address_of(link: SenderLink | ReceiverLink, part: str) -> dict[str, Any]:
    """Return the address of `link`. Raises `DeadlineExceededError` when the engine does not give one at once."""
    address = start_call(lambda: dict(link.address()))
    return result_of(address, Deadline.after(_QUICK_S), "the engine's address", part)


def close_all(links: Iterable[SenderLink | ReceiverLink], part: str) -> None:
    """Close `links`, all at the same time. Never raises; a call that does not end is abandoned."""
    deadline = Deadline.after(_QUICK_S)
    for closing in [start_call(link.close) for link in links]:
        try:
            result_of(closing, deadline, "the engine to be closed", part)
        except Exception as error:  # noqa: BLE001 - of a third party's engine, and the other links are to be closed, too
            _log.warning("%s: the engine could not be closed: %s", part, error)


def start_call(call: Callable[[], T]) -> Future[T]:
    """Start `call` on a thread of its own. Runs it on this thread when the program is ending and no thread can be started."""
    threads = DaemonThreads(1, "weightlane-engine-call")
    try:
        return threads.submit(call)
    except RuntimeError:  # from Python 3.12 on
        ended: Future[T] = Future()
        try:
            ended.set_result(call())
        except Exception as error:  # noqa: BLE001 - raised again where the result is asked for
            ended.set_exception(error)
        return ended
    finally:
        threads.shutdown()
