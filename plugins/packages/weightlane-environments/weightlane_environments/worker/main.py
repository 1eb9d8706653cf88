"""The program of a worker: makes the calls that it reads, one after the other, each within its time limit.

``python -m weightlane_environments.worker.main MODULE SECONDS MIB``. A line of standard input is a call, ``[function,
{arguments}]``, and its answer is a line of standard output: ``{"value": ...}``, or ``{"error": ..., "message": ..., "hint":
...}``. The first line says that MODULE has been imported, or why it cannot be. The program ends with its input, or with the
process that started it.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

_PR_SET_PDEATHSIG = 1


class TimeLimitError(BaseException):
    """Raised in a call that takes too long. Not an `Exception`: libraries catch these and go on."""


def main() -> None:
    """Serve until the input ends."""
    name, limit_s, memory_mib = sys.argv[1], float(sys.argv[2]), int(sys.argv[3])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    resource.setrlimit(resource.RLIMIT_AS, (memory_mib << 20, memory_mib << 20))
    signal.signal(signal.SIGALRM, _interrupt)
    with os.fdopen(os.dup(0)) as calls, os.fdopen(os.dup(1), "w") as answers, Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)  # what a library reads is no call
        os.dup2(2, 1)  # and what it prints is no answer

        def answer(call: Callable[[], Any]) -> None:
            print(json.dumps(_answer_to(call)), file=answers, flush=True)

        answer(lambda: importlib.import_module(name) and None)
        for line in calls:
            function, arguments = json.loads(line)
            answer(lambda: _limited(getattr(sys.modules[name], function), arguments, limit_s))  # noqa: B023 - called at once


def _limited(function: Callable[..., Any], arguments: dict[str, Any], limit_s: float) -> Any:
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        return function(**arguments)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise TimeLimitError


def _answer_to(call: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": call()}
    except BaseException as error:  # noqa: BLE001 - a reply that a library evaluates may call `exit()`
        return {"error": type(error).__name__, "message": str(error), "hint": getattr(error, "hint", "")}


if __name__ == "__main__":
    main()
