"""`within`: a call into a library that may hang."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """Run `call` in a thread of its own. Return its result, or raise its exception.

    ``SystemExit`` and other exceptions of `call` that are no `Exception` are raised as `RuntimeError`, so that callers can tell
    them from Ctrl-C and SIGTERM, which end the wait.

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
    for error in errors:
        if isinstance(error, Exception):
            raise error
        raise RuntimeError(f"{type(error).__name__}: {error}") from error
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} s")
    return outcome[0]
