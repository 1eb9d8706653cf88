"""Processes in which halves live: started once, lent to one check after the other, replaced when a check killed them."""

from __future__ import annotations

import math
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .fork_server import FORK, PID
from .json_line import Line
from .wire import error_from_line

GRACE_S = 10.0
"""How long after its deadline a call counts as hanging."""
_STDERR_SHOWN_CHARACTERS = 3000


class HungError(AssertionError):
    """A call did not come back."""


class RemoteHalf:
    """A process with one half: `start` an operation, then take its `result`."""

    def __init__(self, sock: socket.socket, pid: int, log: Path) -> None:
        self.line = Line(sock)
        self.pid = pid
        self._pidfd = os.pidfd_open(pid)
        self._log = log
        self._bounds: list[tuple[str, float, float]] = []
        """Of running operations: name, when each counts as hanging, and the grace in that."""
        self._stopped = False
        self._closed = False
        self.name = f"process {pid}"
        self.place = 0
        self.seconds = 0.0
        """How long the last operation took."""
        self.grace_s = GRACE_S

    @property
    def alive(self) -> bool:
        """Whether the process runs or is stopped."""
        return not self._closed and not select.select([self._pidfd], [], [], 0)[0]

    @property
    def idle(self) -> bool:
        """Whether the process could take a request now."""
        return self.alive and not self._stopped and not self._bounds

    @property
    def bound(self) -> float:
        """`time.monotonic` at which the oldest running operation counts as hanging."""
        return self._bounds[0][1]

    def start(self, op: str, **arguments: Any) -> None:
        """Ask for an operation; those of one half run one after the other."""
        earliest = max([time.monotonic(), *(bound for _, bound, _ in self._bounds[-1:])])
        # Where no promise about time is looked at, a busy machine may take as long as it needs.
        grace_s = self.grace_s if "deadline_s" in arguments or op == "close" else max(self.grace_s, GRACE_S)
        self._bounds.append((op, earliest + float(arguments.get("deadline_s", 0.0)) + grace_s, grace_s))
        self.line.send({"op": op, **arguments})

    def result(self) -> Any:
        """What the oldest running operation returned; raises what it raised.

        Raises `HungError`, and kills the process, when the answer does not come by the deadline and `grace_s`.
        """
        op, bound, grace_s = self._bounds.pop(0)
        try:
            answer = self.line.receive(max(0.0, bound - time.monotonic()))
        except TimeoutError:
            self.kill()
            raise HungError(
                f"expected {op} of {self.name} to end by its deadline, it hung: {grace_s:g} s later it had not come back"
            ) from None
        if answer is None:
            self.kill()
            raise AssertionError(
                f"expected {op} of {self.name} to return or raise, its process died; it wrote:\n{self._written()}"
            )
        self.seconds = float(answer["s"])
        if "error" in answer:
            raise error_from_line(answer["error"], f"{op} of {self.name}")
        return answer["ok"]

    def call(self, op: str, **arguments: Any) -> Any:
        """`start` and `result`."""
        self.start(op, **arguments)
        return self.result()

    def stop(self) -> None:
        """Freeze the process: for its peers it neither answers nor dies."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGSTOP)
        self._stopped = True

    def resume(self) -> None:
        """Let a frozen process go on."""
        signal.pidfd_send_signal(self._pidfd, signal.SIGCONT)
        self._stopped = False

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        if self._closed:
            return
        try:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        else:
            select.select([self._pidfd], [], [], GRACE_S)
        os.close(self._pidfd)
        self.line.close()
        self._closed = True

    def _written(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")[-_STDERR_SHOWN_CHARACTERS:] or "nothing"


def first_answers(halves: Sequence[RemoteHalf], at_most_s: float = math.inf) -> list[RemoteHalf]:
    """Wait until `result` of some of `halves` would not block, for `at_most_s` seconds; those, or none when time is up."""
    until = min(time.monotonic() + at_most_s, *(half.bound for half in halves))
    if buffered := [half for half in halves if half.line.buffered]:
        return buffered
    ready = select.select([half.line for half in halves], [], [], max(0.0, until - time.monotonic()))[0]
    return [half for half in halves if half.line in ready or half.bound <= time.monotonic()]


class Pool:
    """Lends processes. Makes them by fork from a `nursery`, which loads torch once.

    Linux only: it needs ``/proc`` and process file descriptors.
    """

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="conformance-"))
        """Where the processes have their temporary files, and nobody else."""
        self._log = self.directory / "processes.log"
        self.temporary = self.directory / "tmp"
        self.temporary.mkdir()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",  # more would make fork unsafe, and a half copies bytes only
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "TMPDIR": str(self.temporary),
        }
        with self._log.open("wb") as log, theirs:
            self._nursery = subprocess.Popen(  # noqa: S603 - this very interpreter
                [
                    sys.executable,
                    "-P",
                    "-m",
                    "weightlane.ckpt_engines.conformance.processes.fork_server",
                    str(theirs.fileno()),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        self._idle: list[RemoteHalf] = []
        self._lent: list[RemoteHalf] = []
        self._engine = ""
        self._preloaded: set[str] = set()

    def lend(self, count: int, engine: str, grace_s: float = GRACE_S) -> list[RemoteHalf]:
        """`count` processes in which no other engine than `engine` was ever loaded."""
        if engine != self._engine:
            self._engine = engine
            for half in self._idle:
                half.kill()
            self._idle.clear()
        taken = [*self._idle[:count], *(self._fork() for _ in range(count - len(self._idle)))]
        self._idle = self._idle[count:]
        for place, half in enumerate(taken):
            half.place = place
            half.grace_s = grace_s
        self._lent += taken
        return taken

    def take_back(self) -> None:
        """Keep the processes that are in order, and kill the others."""
        lent, self._lent = self._lent, []
        waiting = []
        for half in lent:
            if half.idle:
                half.start("close")
                waiting.append(half)
            else:
                half.kill()
        failures: list[BaseException] = []
        for half in waiting:
            try:
                half.result()
            except Exception as error:  # noqa: BLE001 - raised below, when all are back
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
        self._control.close()
        try:
            self._nursery.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._nursery.kill()
            self._nursery.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def preload(self, modules: Sequence[str]) -> None:
        """Import modules once for all processes to come. They must not start a thread when they are imported."""
        for module in modules:
            if module not in self._preloaded:
                self._preloaded.add(module)
                self._control.sendall(module.encode())
                self._answer()

    def _fork(self) -> RemoteHalf:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [FORK], [theirs.fileno()])
        try:
            return RemoteHalf(ours, self._answer(), self._log)
        except BaseException:
            ours.close()
            raise

    def _answer(self) -> int:
        answer = self._control.recv(PID.size)
        if len(answer) < PID.size:
            raise RuntimeError(f"the process that forks has died; it wrote:\n{self._log.read_text()}")
        return int(PID.unpack(answer)[0])
