"""Runs a function in a new process, for libraries whose setup would disturb everything else in this process.

The function's module runs as a program. Arguments, result and error are JSON data.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ..errors import DeadlineExceededError, WeightlaneError, WorkerDiedError, as_weightlane_error, error_from_wire


def ask_process(
    module: str,
    arguments: Mapping[str, Any],
    *,
    part: str,
    what: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run `module` as a program, which has to call `answer_asker`, and return its function's result.

    `arguments` are JSON data for the function, by argument name. `environment` are further variables of the program. `part` is
    the caller's name, and `what` the result's, for error messages.

    Raises:
        DeadlineExceededError: The program took longer than `timeout_s`; it and the processes that it started have ended.
        WorkerDiedError: The program ended without a result.
        WeightlaneError: The error that the function raised.
    """
    with subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", module, json.dumps(arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
        start_new_session=True,
    ) as process:
        try:
            output, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as cause:
            raise DeadlineExceededError(f"{what} was not found in {timeout_s:.0f} s.", part=part) from cause
        finally:
            if process.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    try:
        answer = json.loads(output)
    except ValueError as cause:
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["it printed no error"]
        raise WorkerDiedError(
            f"the process that was to find {what} ended with status {process.returncode}: {last[0]}", part=part
        ) from cause
    if "error" in answer:
        raise error_from_wire(answer["error"])
    return answer["value"]


def answer_asker(function: Callable[..., Any], part: str) -> None:
    """Call `function` with the arguments of `ask_process`, and send its result or error back. For a program's main module."""
    # Libraries print to standard output, so the answer goes to a copy of it and theirs to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        answer = {"value": function(**json.loads(sys.argv[1]))}
    except WeightlaneError as error:
        answer = {"error": error.to_wire()}
    except Exception as cause:  # noqa: BLE001 - raised again in the other process
        answer = {"error": as_weightlane_error(cause, part).to_wire()}
    with answers:
        json.dump(answer, answers)
