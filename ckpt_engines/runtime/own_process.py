"""Work in a process of its own: for what sets a process up in a way that nothing else in it would survive.

The module that does the work is run as a program. Its arguments, its answer and its error are plain data.
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

from ..errors import (
    DeadlineExceededError,
    WeightlaneError,
    WorkerDiedError,
    as_weightlane_error,
    error_from_wire,
)


def ask_process(
    module: str,
    arguments: Mapping[str, Any],
    *,
    part: str,
    what: str,
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Run `module` as a program, which has to call `answer_asker`; returns what it answers.

    Args:
        module: Its full name.
        arguments: For its function, by name; as JSON.
        part: Who asks, for error messages.
        what: What is to be found out, for error messages.
        timeout_s: Longest time it may take.
        environment: Variables that it has beside those of this process.

    Raises:
        DeadlineExceededError: It took longer than `timeout_s`; the process and what it started have ended.
        WorkerDiedError: The process ended without an answer.
        WeightlaneError: What the function raised.
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
        last = errors.decode(errors="replace").strip().splitlines()[-1:] or ["nothing was said"]
        raise WorkerDiedError(
            f"the process that was to find {what} ended with {process.returncode}: {last[0]}", part=part
        ) from cause
    if "error" in answer:
        raise error_from_wire(answer["error"])
    return answer["value"]


def answer_asker(function: Callable[..., Any], part: str) -> None:
    """Be the program that `ask_process` runs: call `function` with the arguments, and say what it returns or raises."""
    # Libraries print; the answer goes where nothing else does.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    try:
        answer = {"value": function(**json.loads(sys.argv[1]))}
    except WeightlaneError as error:
        answer = {"error": error.to_wire()}
    except Exception as cause:  # noqa: BLE001 - whatever it is, the other process is told
        answer = {"error": as_weightlane_error(cause, part).to_wire()}
    with answers:
        json.dump(answer, answers)
