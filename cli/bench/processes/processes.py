"""The benchmark's processes: one sender and some receivers, called like objects, and gone whatever happens."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from weightlane.ckpt_engines import DeadlineExceededError, WeightlaneError, WorkerDiedError, error_from_wire
from weightlane.ckpt_engines.conformance.processes.json_line import Line

_PART = "benchmark"
_START_S = 120.0
_END_S = 10.0
_LOOK_MS = 200
_LOG_SHOWN_CHARACTERS = 500


class Worker:
    """A process of the benchmark. Thread-safe: one call at a time."""

    def __init__(self, name: str, line: Line, log: Callable[[], str]) -> None:
        self.name = name
        self.pid = 0
        self.line = line
        self._log = log
        self._turn = threading.Lock()

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """What the method of `worker` returns there.

        Raises `WorkerDiedError`, `DeadlineExceededError` when it does not answer in time, or what it raised.
        """
        with self._turn:
            try:
                self.line.send({"method": method, "arguments": arguments})
                answer = self.line.receive(timeout_s)
            except TimeoutError:
                raise DeadlineExceededError(
                    f"{method} did not end within {timeout_s:.0f} s.",
                    part=_PART,
                    peer=self.name,
                    hint="Give it more time with --deadline-s, or measure a smaller model.",
                ) from None
            except (OSError, ValueError):
                answer = None
        if answer is None:
            raise self.died()
        if "error" in answer:
            raise error_from_wire(answer["error"])
        return answer["value"]

    def died(self) -> WorkerDiedError:
        """The error that says so, with the last that was written to standard error."""
        said = self._log().strip()
        return WorkerDiedError(
            f"process {self.pid} has ended in the middle of the run.",
            part=_PART,
            peer=self.name,
            hint=f"It last said: {said[-_LOG_SHOWN_CHARACTERS:]}"
            if said
            else "Was it killed, for want of memory perhaps?",
        )


class Processes:
    """One sender and `receivers` receivers, with `shared_bytes` of memory in common; a context manager that ends them.

    They end with this process, too, even if it is killed outright, and `directory` is then removed with what they wrote there.

    Raises `WorkerDiedError` or `DeadlineExceededError` when they do not start.
    """

    def __init__(self, receivers: int, shared_bytes: int, directory: Path | None = None) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        names = ["sender", *(f"receiver-{number}" for number in range(receivers))]
        ours, theirs = zip(*(socket.socketpair() for _ in names), strict=True)
        control, their_control = socket.socketpair()
        self._control = Line(control)
        self._workers = [Worker(name, Line(sock), self._said) for name, sock in zip(names, ours, strict=True)]
        self.sender, *self.receivers = self._workers
        self._on_death: Callable[[Worker, WorkerDiedError], None] | None = None
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(len(names), thread_name_prefix="weightlane-bench")
        descriptors = [their_control.fileno(), shared_bytes, *(sock.fileno() for sock in theirs)]
        self._nursery = subprocess.Popen(  # noqa: S603 - this program itself
            [
                sys.executable,
                "-m",
                "weightlane.cli.bench.processes.fork_server",
                str(directory or ""),
                *map(str, descriptors),
            ],
            pass_fds=[descriptors[0], *descriptors[2:]],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"} | os.environ,
        )
        for sock in (*theirs, their_control):
            sock.close()
        self._watch = threading.Thread(target=self._look_out, name="weightlane-bench-watch", daemon=True)
        try:
            self._await_start()
        except BaseException:
            self.close()
            raise
        self._watch.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, the sender's first."""
        return [worker.pid for worker in self._workers]

    def every(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """`Worker.call` on the sender and all receivers at once; the first error when there is one, a death at once."""
        return self._at_once(self._workers, method, arguments, timeout_s)

    def every_receiver(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """`Worker.call` on all receivers at once."""
        return self._at_once(self.receivers, method, arguments, timeout_s)

    def on_death(self, tell: Callable[[Worker, WorkerDiedError], None] | None) -> None:
        """Whom to tell, on a thread of its own, when a process dies."""
        self._on_death = tell

    def raise_if_dead(self, cause: BaseException | None = None) -> None:
        """Raise `WorkerDiedError` when a process is gone: what else went wrong is then its consequence."""
        for worker in self._workers:
            if _hung_up(worker, 0):
                raise worker.died() from cause

    def close(self) -> None:
        """Kill every process and wait until it is gone. Idempotent."""
        self._ended.set()
        self._control.close()  # the nursery then kills the workers
        try:
            self._nursery.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._nursery.kill()  # and the kernel kills them
            self._nursery.wait(_END_S)
        if self._watch.ident is not None:
            self._watch.join(_END_S)
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.line.close()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _at_once(self, workers: Sequence[Worker], method: str, arguments: Sequence[Any], timeout_s: float) -> list[Any]:
        calls = [self._threads.submit(worker.call, method, *arguments, timeout_s=timeout_s) for worker in workers]
        left: set[Future[Any]] = set(calls)
        while left:
            ended, left = wait(left, return_when=FIRST_COMPLETED)
            for call in ended:
                if isinstance(error := call.exception(), WorkerDiedError):
                    raise error  # others may wait for it in vain, until they are ended, too
        return [call.result() for call in calls]

    def _await_start(self) -> None:
        try:
            told = self._control.receive(_START_S)
        except TimeoutError:
            raise DeadlineExceededError(f"no process started within {_START_S:.0f} s.", part=_PART) from None
        if told is None:
            raise WorkerDiedError(f"the processes could not be started: {self._said().strip()}", part=_PART)
        for worker, pid in zip(self._workers, told["pids"], strict=True):
            worker.pid = pid

    def _look_out(self) -> None:
        told: set[str] = set()
        while not self._ended.is_set():
            for worker in self._workers:
                if worker.name in told or not _hung_up(worker, 0):
                    continue
                told.add(worker.name)
                if (tell := self._on_death) is not None:
                    with contextlib.suppress(WeightlaneError):  # the store may be gone by now
                        tell(worker, worker.died())
            self._ended.wait(_LOOK_MS / 1000)

    def _said(self) -> str:
        with contextlib.suppress(ValueError, OSError):  # closed
            return os.pread(self._log.fileno(), 1 << 20, 0).decode(errors="replace")
        return ""


def _hung_up(worker: Worker, timeout_ms: int) -> bool:
    """Whether the other end is closed; does not read what it may have said before."""
    poll = select.poll()
    try:
        poll.register(worker.line.fileno(), 0)
    except ValueError:
        return True
    return any(event & (select.POLLHUP | select.POLLERR | select.POLLNVAL) for _, event in poll.poll(timeout_ms))


def meeting_point(delay_s: float = 0.01) -> float:
    """A moment (`time.monotonic`, the same clock in all processes) at which several processes can begin together."""
    return time.monotonic() + delay_s
