"""`Programs`: runs agents that are programs, many at once and without a thread for each."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import WorkerDiedError
from weightlane.ckpt_engines.runtime.fork_server import ForkedProcess, ForkServer
from weightlane.ckpt_engines.runtime.threads import DaemonThreads

from . import supervisor

_PART = "agent"


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended, and the last of what it printed."""

    status: int
    out: str
    err: str


class Programs:
    """Starts programs by way of a fork server, which ends them all when this process ends, even if it is killed.

    Modules `preload` are imported once. A command that is ``python SCRIPT ...`` is then forked from a process that has them,
    instead of started, if there are any.
    """

    def __init__(self, preload: Sequence[str]) -> None:
        self._preload = tuple(preload)
        self._server: ForkServer | None = None
        self._thread = DaemonThreads(1, "weightlane-agents")  # the server answers one request at a time

    async def run(self, command: Sequence[str], environment: Mapping[str, str], given: str, folder: Path) -> Ended:
        """Run `command` in `folder` until it ends, with `given` as its standard input.

        When this coroutine is cancelled, the program is killed, with all that it has started and that has not left its group.
        Raises `WorkerDiedError` if a program cannot be started.
        """
        order = {
            "command": list(command),
            "environment": dict(environment),
            "stdin": given,
            "folder": str(folder),
            "forked": bool(self._preload),
        }
        starting = asyncio.wrap_future(self._thread.submit(self._started, order))
        try:
            child = await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(_killed)
            raise
        try:
            ended = await _answer(child)
        finally:
            _kill(child)
        if ended is None:
            raise WorkerDiedError("the process that supervises the program was killed.", part=_PART)
        return Ended(**ended)

    def close(self) -> None:
        """End all programs and the fork server."""
        self._thread.submit(self._close).result()
        self._thread.shutdown()

    def _started(self, order: dict[str, Any]) -> ForkedProcess:
        if self._server is None:
            self._server = ForkServer([supervisor.__name__, *self._preload])
        child = self._server.fork(f"{supervisor.__name__}:supervise")
        child.socket.send(order)
        return child

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()


async def _answer(child: ForkedProcess) -> dict[str, Any] | None:
    """Wait for the supervisor's message. It is short, so that it is there as a whole."""
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(child.socket.fileno(), readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(child.socket.fileno())
    return child.socket.receive()


def _killed(starting: asyncio.Future[ForkedProcess]) -> None:
    """Kill a program whose start was awaited by nobody when it was complete."""
    if not starting.cancelled() and starting.exception() is None:
        _kill(starting.result())


def _kill(child: ForkedProcess) -> None:
    if child.alive:  # it leads its group, so that the group's number is no other's
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.kill()
