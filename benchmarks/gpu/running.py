"""Runs one step: a process of its own in a session of its own, ended with all that it started when its time is over."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .checkout import ROOT

PASSED, FAILED, LATE, NOT_RUN = "passed", "failed", "took too long", "not run"
_LEAST_S = 5.0
"""A step with less time than this is not begun."""
_END_S = 10.0
_SHOWN_CHARACTERS = 300
_PATH = re.compile(r"/(?:[\w.@+-]+/)+")


class StepFailedError(Exception):
    """Raised by `Step.figures` when what the program found is a failure, whatever its exit code was.

    `why` is the reason, for the table; `figures` were measured nevertheless.
    """

    def __init__(self, why: str, figures: dict[str, Any]) -> None:
        super().__init__(why)
        self.figures = figures


@dataclass(frozen=True)
class Step:
    """Something to run, and what to take out of what it finds."""

    name: str
    part: str
    """``one``, ``training``, ``multi`` or ``vllm``."""
    about: str
    """Its column in the table: the promise or the cost that it shows."""
    command: Sequence[str]
    """Arguments of the Python; ``{out}`` is the file that the program writes its findings to."""
    figures: Callable[[Path], dict[str, Any]]
    """Makes figures of that file; raises `StepFailedError` when they show that the step has failed."""
    limit_s: float
    shown_as: str = ""
    """How a user would run it, if not as `command` says."""
    needs: Callable[[Mapping[str, Any]], str] = lambda _: ""
    """Says why it cannot run with these facts; empty when it can."""

    @property
    def shown(self) -> str:
        """The command as text."""
        return self.shown_as or f"python {shlex.join(self.command)}".replace(" --json '{out}'", "")


@dataclass
class Result:
    """Outcome of one step, with the figures it produced and, if it did not pass, the reason."""

    name: str
    part: str
    about: str
    command: str
    outcome: str
    seconds: float = 0.0
    limit_s: float = 0.0
    why: str = ""
    figures: dict[str, Any] = field(default_factory=dict)


def run_step(step: Step, facts: Mapping[str, Any], folder: Path, left_s: float, env: Mapping[str, str]) -> Result:
    """Run `step` within its own limit and what is left of the time for all; what it says goes to a file of `folder`."""
    limit_s = min(step.limit_s, left_s)
    result = Result(step.name, step.part, step.about, step.shown, NOT_RUN, limit_s=round(limit_s, 1))
    if why := step.needs(facts):
        result.why = why
        return result
    if limit_s < _LEAST_S:
        result.why = "the time for all steps was over"
        return result
    out, log = folder / f"{step.name}.json", folder / f"{step.name}.log"
    command = [sys.executable, *(part.format(out=out) for part in step.command)]
    started = time.monotonic()
    with log.open("wb") as written:
        child = subprocess.Popen(  # noqa: S603 - programs of this folder
            command,
            cwd=ROOT,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=written,
            stderr=written,
            start_new_session=True,
        )
        try:
            status: int | None = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(child)
    result.seconds = round(time.monotonic() - started, 1)
    result.outcome = LATE if status is None else FAILED if status else PASSED
    try:
        result.figures = step.figures(out) if out.exists() else {}
    except StepFailedError as failure:
        result.outcome, result.why, result.figures = FAILED, str(failure), failure.figures
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        result.outcome, result.why = FAILED, f"its findings cannot be read: {type(error).__name__}: {error}"
    if result.outcome != PASSED:
        result.why = result.why or last_words(log.read_text(encoding="utf-8", errors="replace"))
    return result


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the session that the step began, whatever is left of it, and wait for its first process."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(_END_S)


def last_words(text: str) -> str:
    """The last line that says something, without paths of this machine."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return _PATH.sub("", lines[-1])[:_SHOWN_CHARACTERS] if lines else "it said nothing"
