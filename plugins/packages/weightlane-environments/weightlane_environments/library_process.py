"""`LibraryProcess`: makes the calls of a library in a process of its own, and turns their failures into typed errors."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
import sys
from contextlib import suppress
from typing import Any

from pydantic import Field

from weightlane.ckpt_engines import ClosedError, ConfigError, DeadlineExceededError, EpisodeError, WorkerDiedError
from weightlane.trainer.loop.environments import Options

_START_S = 120.0
"""Most seconds until a library has been imported, on a busy machine with a cold disk."""
_GRACE_S = 5.0
"""Seconds beyond its limit after which a call is stuck where Python cannot interrupt it, and its process is killed."""
_ANSWERS = 2
"""Lines that a process writes which makes one call: the first says that the library has been imported."""
_LINE_BYTES = 64 << 20
"""Most bytes of an answer."""


class LibraryOptions(Options):
    """Options of an environment whose library runs in processes of its own."""

    processes: int = Field(default=1, ge=1, description="Processes that make the library's calls, each one at a time.")
    call_time_limit_s: float = Field(
        default=30.0, gt=0, description="Most seconds of a call; one that takes longer costs its episode."
    )
    memory_mib: int = Field(default=4096, ge=256, description="Most memory of a process, in MiB of address space.")
    variables: tuple[str, ...] = Field(
        default=("PATH", "HOME", "LANG", "TMPDIR", "PYTHONPATH", "LD_LIBRARY_PATH"),
        description="Environment variables that the processes get. They may evaluate replies: leave out secrets.",
    )


class LibraryProcesses:
    """`options.processes` of `LibraryProcess`, which take turns. The arguments are those of one."""

    def __init__(self, module: str, *, library: str, name: str, options: LibraryOptions) -> None:
        self._all = [
            LibraryProcess(module, library=library, name=name, options=options) for _ in range(options.processes)
        ]
        self._turns = itertools.cycle(self._all)

    def call_once(self, function: str, /, **arguments: Any) -> Any:
        """See `LibraryProcess.call_once`."""
        return self._all[0].call_once(function, **arguments)

    def following(self) -> LibraryProcess:
        """Return the process whose turn it is."""
        return next(self._turns)

    async def close(self) -> None:
        """Kill the processes, and refuse further calls."""
        for process in self._all:
            await process.close()


class LibraryProcess:
    """Calls functions of a module of `weightlane_environments.worker` in a process, one after the other.

    The calls are short, and the libraries have no asynchronous form of them. In a thread, a call that hangs would keep its thread
    for ever, and replies that a library evaluates would run in the trainer's process. The process is started by the first
    call, and again after it has ended.

    Args:
        module: The module's name.
        library: The library's name, for errors.
        name: The environment's name, which is also that of the extra that installs the library.
        options: The limits.
    """

    def __init__(self, module: str, *, library: str, name: str, options: LibraryOptions) -> None:
        self._part, self._library, self._name = f"environment {name}", library, name
        self._limit_s, self._memory_mib = options.call_time_limit_s, options.memory_mib
        worker = "weightlane_environments.worker"
        limits = [str(self._limit_s), str(self._memory_mib)]
        self._command = [sys.executable, "-m", f"{worker}.main", f"{worker}.{module}", *limits]
        kept = {key: os.environ[key] for key in options.variables if key in os.environ}
        # Libraries for matrices allocate memory for each core. What is drawn from a set depends on the seed of hashes.
        self._environment = {**kept, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        self._process: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    def call_once(self, function: str, /, **arguments: Any) -> Any:
        """Return what `function` returns in a process that ends again, and wait for it. Raises as `call` does."""
        try:
            done = subprocess.run(  # noqa: S603 - this package's own program
                self._command,
                input=json.dumps([function, arguments]) + "\n",
                capture_output=True,
                text=True,
                timeout=_START_S + self._limit_s + _GRACE_S,
                env=self._environment,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise self._too_long(function) from None
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        if answers:
            self._check_imported(answers[0])
        if len(answers) < _ANSWERS:
            raise self._died(function)
        return self._value(answers[1], function)

    async def call(self, function: str, /, **arguments: Any) -> Any:
        """Return what `function` returns.

        Raises:
            ClosedError: The environment is closed.
            ConfigError: The library is missing, or refuses the arguments whatever the model replies.
            DeadlineExceededError: The call took too long.
            WorkerDiedError: The process ended.
            EpisodeError: The function raised anything else.
        """
        exchange = asyncio.ensure_future(self._exchange(function, arguments))
        exchange.add_done_callback(
            lambda done: done.cancelled() or done.exception()
        )  # else asyncio logs that nobody asked
        return await asyncio.shield(exchange)  # an answer that an episode no longer waits for must still be read

    async def close(self) -> None:
        """Kill the process, and refuse further calls."""
        self._closed = True
        await self._kill()

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _exchange(self, function: str, arguments: dict[str, Any]) -> Any:
        async with self._turn:
            if self._closed:
                raise ClosedError("the environment is closed.", part=self._part)
            process = self._process or await self._started()
            line = json.dumps([function, arguments])
            answer = await self._answered(process, line, self._limit_s + _GRACE_S, function)
        return self._value(answer, function)

    async def _started(self) -> asyncio.subprocess.Process:
        pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=pipe,
            stdout=pipe,
            stderr=nowhere,
            env=self._environment,
            limit=_LINE_BYTES,
            start_new_session=True,  # an interrupt in the terminal is the run's to handle
        )
        answer = await self._answered(process, None, _START_S, "import")
        if "error" in answer:
            await self._kill()
        self._check_imported(answer)
        return process

    async def _answered(
        self, process: asyncio.subprocess.Process, line: str | None, limit_s: float, function: str
    ) -> dict[str, Any]:
        """Write a line, if there is one, and return the answer that comes next. The process is killed if none comes."""
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                if line is not None:
                    process.stdin.write(line.encode() + b"\n")
                    await process.stdin.drain()
                answer = await process.stdout.readline()
        except TimeoutError:
            await self._kill()
            raise self._too_long(function) from None
        except (ConnectionError, ValueError):
            answer = b""
        if not answer.endswith(b"\n"):
            await self._kill()
            raise self._died(function)
        parsed: dict[str, Any] = json.loads(answer)
        return parsed

    def _check_imported(self, answer: dict[str, Any]) -> None:
        if "error" in answer:
            raise ConfigError(
                f"{self._library} cannot be imported: {answer['error']}: {answer['message']}.",
                part=self._part,
                hint=f"pip install 'weightlane-environments[{self._name}]', with the Python of this run.",
            )

    def _value(self, answer: dict[str, Any], function: str) -> Any:
        """Return the value of an answer to a call. Raises the error that it has instead."""
        error = answer.get("error")
        if error is None:
            return answer["value"]
        if error == "RefusedError":
            raise ConfigError(answer["message"], part=self._part, hint=answer["hint"])
        if error == "TimeLimitError":
            raise self._too_long(function)
        raise EpisodeError(f"{function} raised {error}: {answer['message']}.", part=self._part)

    def _died(self, function: str) -> WorkerDiedError:
        return WorkerDiedError(
            f"the process of {self._library} ended in a call of {function}.",
            part=self._part,
            hint=f"It may have needed more than environment.options.memory_mib, {self._memory_mib} MiB.",
        )

    def _too_long(self, function: str) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{function} of {self._library} took longer than {self._limit_s:g} s.",
            part=self._part,
            hint="Raise environment.options.call_time_limit_s if it only needs longer.",
        )
