"""Python programs that tests call by method name: lists in JSON to standard input, and answers from standard output.

The programs are forked from one that has imported vLLM, and may print what they like beside their answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fork_server import ForkedPopen

_MARK = "ANSWER "


def serve(target: object) -> None:
    """In the program: obey until ``close`` was called, or until nobody can call any more."""
    for line in sys.stdin:
        method, *arguments = json.loads(line)
        print(f"\n{_MARK}{json.dumps(getattr(target, method)(*arguments))}", flush=True)
        if method == "close":
            return


class Program:
    """In the test: one such program. It ends with `kill`, or when the test's process ends.

    Args:
        path: The program.
        arguments: Its arguments.
        env: Environment variables that it gets beside those of the test.
        again: Whether it is started again for the next call after it has ended by itself: it keeps nothing between calls.
    """

    def __init__(self, path: Path, *arguments: str, env: Mapping[str, str] | None = None, again: bool = False) -> None:
        self._command = [sys.executable, str(path), *arguments]
        self._env = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        self._again = again
        self.process = self._start()

    def _start(self) -> ForkedPopen:
        return ForkedPopen(
            self._command,
            env=self._env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def ask(self, method: str, *arguments: Any) -> None:
        """Begin a call; `answer` waits for its end."""
        if self._again and self.process.poll() is not None:
            self.kill()
            self.process = self._start()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps([method, *arguments]) + "\n")
        self.process.stdin.flush()

    def answer(self) -> Any:
        """Return the answer to the call that was begun last.

        Raises:
            AssertionError: The program ended. The reason is on its standard error, which it shares with the test.
        """
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        raise AssertionError(f"{' '.join(self._command[1:])} ended with {self.process.wait()} instead of an answer")

    def call(self, method: str, *arguments: Any) -> Any:
        self.ask(method, *arguments)
        return self.answer()

    def kill(self) -> None:
        """End it, and what it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with self.process:  # closes its pipes, too
            self.process.kill()


def call_all(programs: Sequence[Program], method: str, *arguments: Any) -> list[Any]:
    """Call all of them at the same time, as collective calls need it; answers in order."""
    for program in programs:
        program.ask(method, *arguments)
    return [program.answer() for program in programs]
