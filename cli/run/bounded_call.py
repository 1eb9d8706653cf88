"""`within`: a call into a library that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """Run `call` in a thread of its own. Return its result, or raise its exception, ``SystemExit`` included.

    Raises `TimeoutError` after `seconds`; the thread is then abandoned.
    """
    outcome: list[_T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return outcome[0]
