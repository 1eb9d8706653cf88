"""Processes for the halves of an engine: started once, lent to one check after the other, replaced when a check kills them."""

from __future__ import annotations

import math
import select
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import WeightlaneError
from ...runtime.fork_server import ForkedProcess, ForkServer
from .errors_as_json import UntypedError, error_from_json

GRACE_S = 10.0
"""Seconds after its deadline at which a call counts as hanging."""
_OUTPUT_CHARACTERS = 3000
"""Number of characters that an error quotes from the end of a dead process's output: enough for the end of a long traceback."""
_HALF_PROCESS = f"{__package__}.half_process"


class HungError(AssertionError):
    """A call did not return by its deadline and the grace period."""


class RemoteHalf:
    """A process with one half of an engine: `start` an operation of `HalfProcess`, then take its `result`."""

    def __init__(self, process: ForkedProcess) -> None:
        self.process = process
        self._running: list[tuple[str, float, float]] = []
        """Name of each running operation, `time.monotonic` at which it counts as hanging, and the grace period (s) included."""
        self._stopped = False
        self.name = f"process {process.pid}"
        self.index = 0
        """Number of the process among those of its connection, which chooses its device."""
        self.seconds = 0.0
        """Duration of the last operation."""
        self.grace_s = GRACE_S
        self.team = ""
        """The team for which the process is lent, always the same one."""

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    @property
    def idle(self) -> bool:
        """Whether the process could take a request now."""
        return self.process.alive and not self._stopped and not self._running

    @property
    def hangs_at(self) -> float:
        """`time.monotonic` at which the oldest running operation counts as hanging."""
        return self._running[0][1]

    def start(self, op: str, **arguments: Any) -> None:
        """Request an operation. The process runs its operations one after the other."""
        earliest = max([time.monotonic(), *(hangs_at for _, hangs_at, _ in self._running[-1:])])
        # An operation without a promise about time gets more of it, since the machine may be busy.
        grace_s = self.grace_s if "deadline_s" in arguments or op == "close" else max(self.grace_s, GRACE_S)
        self._running.append((op, earliest + float(arguments.get("deadline_s", 0.0)) + grace_s, grace_s))
        self.process.socket.send({"op": op, **arguments})

    def result(self) -> Any:
        """Return what the oldest running operation returned, or raise what it raised.

        Raises `HungError`, and kills the process, when the answer does not arrive by the deadline and `grace_s`.
        """
        op, hangs_at, grace_s = self._running.pop(0)
        try:
            answer = self.process.socket.receive(max(0.0, hangs_at - time.monotonic()))
        except TimeoutError:
            self.kill()
            raise HungError(
                f"expected {op} of {self.name} to end by its deadline, it hung: {grace_s:g} s later it had not returned"
            ) from None
        if answer is None:
            self.kill()
            output = self.process.output()[-_OUTPUT_CHARACTERS:] or "nothing"
            raise AssertionError(
                f"expected {op} of {self.name} to return or raise, its process died; its output was:\n{output}"
            )
        self.seconds = float(answer["s"])
        if "error" in answer:
            raise error_from_json(answer["error"], f"{op} of {self.name}")
        return answer["ok"]

    def call(self, op: str, **arguments: Any) -> Any:
        """`start` an operation and return its `result`."""
        self.start(op, **arguments)
        return self.result()

    def failure(self, types: tuple[type[WeightlaneError], ...], expected: str) -> WeightlaneError:
        """Return the error of the oldest operation, which must be one of `types`; `expected` begins the message of a failure."""
        try:
            answer = self.result()
        except WeightlaneError as raised:
            error = raised
        except UntypedError as untyped:
            raise AssertionError(f"{expected}, {untyped.said}") from untyped
        else:
            raise AssertionError(f"{expected}, it returned {answer!r}")
        assert isinstance(error, types), f"{expected}, it raised {type(error).__name__}: {error}"
        return error

    def stop(self) -> None:
        """Freeze the process. It neither answers its peers nor dies."""
        self.process.send_signal(signal.SIGSTOP)
        self._stopped = True

    def resume(self) -> None:
        """Let a frozen process continue."""
        self.process.send_signal(signal.SIGCONT)
        self._stopped = False

    def kill(self) -> None:
        """Kill the process with SIGKILL and wait until it has ended."""
        self.process.kill()


def first_answers(halves: Sequence[RemoteHalf], at_most_s: float = math.inf) -> list[RemoteHalf]:
    """Wait up to `at_most_s` seconds for halves whose `result` would not block, and return those halves; none after that time."""
    until = min(time.monotonic() + at_most_s, *(half.hangs_at for half in halves))
    if buffered := [half for half in halves if half.process.socket.buffered]:
        return buffered
    sockets = [half.process.socket for half in halves]
    ready = select.select(sockets, [], [], max(0.0, until - time.monotonic()))[0]
    return [half for half in halves if half.process.socket in ready or half.hangs_at <= time.monotonic()]


class Pool:
    """Lends processes to checks. A fork server that has torch loaded starts them. Linux only.

    Each process runs the function ``serve`` of `module`, which answers the operations that checks request.
    """

    def __init__(self, module: str = _HALF_PROCESS) -> None:
        self._module = module
        directory = Path(tempfile.mkdtemp(prefix="conformance-"))
        self.temporary = directory / "tmp"
        """Temporary files of the processes, and nothing else."""
        self.temporary.mkdir()
        self._server = ForkServer([module], directory=directory, environment={"TMPDIR": str(self.temporary)})
        self._idle: list[RemoteHalf] = []
        self._lent: list[RemoteHalf] = []
        self._engine = ""

    def lend(self, count: int, engine: str, grace_s: float = GRACE_S, team: str = "") -> list[RemoteHalf]:
        """Return `count` processes in which no engine other than `engine` was ever loaded.

        With `team`, a process is lent again only to a team of this name and at the same index: libraries may keep state that
        depends on the rank until the process ends.
        """
        if engine != self._engine:
            self._engine = engine
            for half in self._idle:
                half.kill()
            self._idle.clear()
        taken = []
        for index in range(count):
            fitting = (idle for idle in self._idle if idle.team == team and (not team or idle.index == index))
            found = next(fitting, None)
            if found is not None:
                self._idle.remove(found)
            half = found or RemoteHalf(self._server.fork(f"{self._module}:serve"))
            half.index, half.team, half.grace_s = index, team, grace_s
            taken.append(half)
        self._lent += taken
        return taken

    def take_back(self) -> None:
        """Keep the lent processes that are idle, and kill the others. Raises the first error of their `close`."""
        lent, self._lent = self._lent, []
        closing = []
        for half in lent:
            if half.idle:
                half.start("close")
                closing.append(half)
            else:
                half.kill()
        failures: list[BaseException] = []
        for half in closing:
            try:
                half.result()
            except Exception as error:  # noqa: BLE001 - raised below, after every process was taken back
                half.kill()
                failures.append(error)
            else:
                self._idle.append(half)
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End every process and remove their files."""
        for half in [*self._idle, *self._lent]:
            half.kill()
        self._server.close()

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules once for all later processes. Importing them must not start a thread."""
        for module in modules:
            self._server.preload(module)
