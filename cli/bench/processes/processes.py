"""The benchmark's processes: one sender and its receivers, called like objects, and ended whatever happens."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from weightlane.ckpt_engines import DeadlineExceededError, WeightlaneError, WorkerDiedError, error_from_wire
from weightlane.ckpt_engines.runtime.fork_server import ForkedProcess, ForkServer

_PART = "benchmark"
_POLL_S = 0.2
"""Seconds between two checks for dead processes."""
_END_S = 10.0
"""Seconds that the callback for a dead process may delay the end."""
_UNTIL_MEETING_S = 0.01
"""Seconds until processes start together: each has to be called before."""
_OUTPUT_CHARACTERS = 500
"""How much of a dead process's output its error quotes: the last lines of a traceback."""


class Worker:
    """A process of the benchmark. Thread-safe: it does one call at a time."""

    def __init__(self, name: str, process: ForkedProcess) -> None:
        self.name = name
        self.process = process
        self._turn = threading.Lock()

    def call(self, method: str, *arguments: Any, timeout_s: float) -> Any:
        """Call a method of `WorkerMethods` in the process and return its result.

        Raises `WorkerDiedError`, `DeadlineExceededError` when there is no answer after `timeout_s`, or the method's error.
        """
        with self._turn:
            try:
                self.process.socket.send({"method": method, "arguments": arguments})
                answer = self.process.socket.receive(timeout_s)
            except TimeoutError:
                raise DeadlineExceededError(
                    f"{method} did not end within {timeout_s:.0f} s.",
                    part=_PART,
                    peer=self.name,
                    hint="Allow more time with --deadline-s, or measure a smaller model.",
                ) from None
            except (OSError, ValueError):
                answer = None
        if answer is None:
            raise self.died()
        if "error" in answer:
            raise error_from_wire(answer["error"])
        return answer["value"]

    def died(self) -> WorkerDiedError:
        """Return the error for a process that has ended. It quotes the end of the process's output."""
        output = self.process.output().strip()
        return WorkerDiedError(
            f"process {self.process.pid} ended during the run.",
            part=_PART,
            peer=self.name,
            hint=f"The end of its output: {output[-_OUTPUT_CHARACTERS:]}"
            if output
            else "It printed nothing; perhaps the system killed it for lack of memory.",
        )


class Processes:
    """A context manager with one sender and `receivers` receivers that share `shared_bytes` of memory.

    The processes end with this one, even if it is killed. `directory` is then removed, with everything that they wrote there.

    Raises `WorkerDiedError` or `DeadlineExceededError` when the processes do not start.
    """

    worker: ClassVar[str] = f"{__package__}.worker"
    """The module whose ``serve`` each process runs."""

    def __init__(self, receivers: int, shared_bytes: int, directory: Path | None = None) -> None:
        shared = os.memfd_create("weightlane-bench")
        os.ftruncate(shared, max(1, shared_bytes))
        self._server = ForkServer([self.worker], directory=directory, descriptors=[shared])
        os.close(shared)  # the server has it
        self._workers: list[Worker] = []
        self._on_death: Callable[[Worker, WorkerDiedError], None] | None = None
        self._ended = threading.Event()
        self._threads = ThreadPoolExecutor(1 + receivers, thread_name_prefix="weightlane-bench")
        self._watch = threading.Thread(target=self._watch_workers, name="weightlane-bench-watch", daemon=True)
        try:
            for index in range(1 + receivers):
                process = self._server.fork(f"{self.worker}:serve", index, shared)
                self._workers.append(Worker(f"receiver-{index - 1}" if index else "sender", process))
        except BaseException:
            self.close()
            raise
        self.sender, *self.receivers = self._workers
        self._watch.start()

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, the sender's first."""
        return [worker.process.pid for worker in self._workers]

    def every(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """`Worker.call` on the sender and all receivers at once. Raises the first error; that of a dead process immediately."""
        return self._call_all(self._workers, method, arguments, timeout_s)

    def every_receiver(self, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """`Worker.call` on all receivers at once."""
        return self._call_all(self.receivers, method, arguments, timeout_s)

    def on_death(self, callback: Callable[[Worker, WorkerDiedError], None] | None) -> None:
        """Set the function that is called, on a thread of its own, when a process dies."""
        self._on_death = callback

    def raise_if_dead(self, cause: BaseException) -> None:
        """Raise `WorkerDiedError` when a process has ended, because `cause` is then its consequence."""
        for worker in self._workers:
            if not worker.process.alive:
                raise worker.died() from cause

    def close(self) -> None:
        """Kill every process and wait until it has ended. Idempotent."""
        self._ended.set()
        self._server.close()
        if self._watch.ident is not None:
            self._watch.join(_END_S)
        self._threads.shutdown(wait=True)
        for worker in self._workers:
            worker.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _call_all(
        self, workers: Sequence[Worker], method: str, arguments: Sequence[Any], timeout_s: float
    ) -> list[Any]:
        calls = [self._threads.submit(worker.call, method, *arguments, timeout_s=timeout_s) for worker in workers]
        running: set[Future[Any]] = set(calls)
        while running:
            ended, running = wait(running, return_when=FIRST_COMPLETED)
            for call in ended:
                if isinstance(error := call.exception(), WorkerDiedError):
                    raise error  # the other calls may wait for the dead process until they are ended too
        return [call.result() for call in calls]

    def _watch_workers(self) -> None:
        reported: set[str] = set()
        while not self._ended.wait(_POLL_S):
            for worker in self._workers:
                if worker.name in reported or worker.process.alive:
                    continue
                reported.add(worker.name)
                if (callback := self._on_death) is not None:
                    with contextlib.suppress(WeightlaneError):  # the rendezvous may have ended by now
                        callback(worker, worker.died())


def meeting_point() -> float:
    """Return a time on `time.monotonic`, the same clock in all processes, at which several processes can start together."""
    return time.monotonic() + _UNTIL_MEETING_S
