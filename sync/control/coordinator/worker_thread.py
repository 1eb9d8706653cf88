"""`WorkerThread`: awaits the coordinator's blocking calls on an event loop. `run_to_end`: shields a step from cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from weightlane.ckpt_engines import ClosedError, Deadline, DeadlineExceededError
from weightlane.ckpt_engines.runtime.daemon_threads import DaemonThreads

from ..hub.frames import COORDINATOR
from .message_queue import MessageQueue

T = TypeVar("T")
INTERRUPTED_S = 60.0
"""Time limit in seconds for an interrupted call, or one whose deadline has passed, to end."""


class WorkerThread:
    """Runs one blocking call at a time on its own thread, because the event loop's executor may be busy with other work.

    Args:
        queue: The queue that the calls wait on.
    """

    def __init__(self, queue: MessageQueue) -> None:
        self._queue = queue
        self._threads = DaemonThreads(1, "weightlane-coordinate")

    async def run(self, deadline: Deadline, call: Callable[..., T], *arguments: Any) -> T:
        """Run `call`, which must end by `deadline`. It is interrupted if this task is cancelled."""
        if self._queue.closed:
            raise ClosedError("the coordinator was closed.", part=COORDINATOR)
        self._queue.interruption = None
        running = self._threads.submit(call, *arguments)
        ended = asyncio.wrap_future(running)
        try:
            await asyncio.wait({ended}, timeout=deadline.remaining_s + INTERRUPTED_S)
        except asyncio.CancelledError:
            if not running.cancel():
                self._queue.interrupt(ClosedError("the call was cancelled.", part=COORDINATOR))
                await run_to_end(asyncio.wait({ended}, timeout=INTERRUPTED_S))
                _retrieve_error(ended)
            raise
        if not ended.done():
            running.cancel()
            raise DeadlineExceededError(
                "a call on the coordinator's thread has not ended in time.",
                part=COORDINATOR,
                hint="The process that runs the coordinator may be stuck; end the run and start it again.",
            )
        return ended.result()

    def close(self) -> None:
        """Let the thread end after its current call. Never waits."""
        self._threads.shutdown()


async def run_to_end(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end even if the caller is cancelled in the meantime; the cancellation is raised afterwards."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        _retrieve_error(task)
        raise cancelled
    return task.result()


def _retrieve_error(future: asyncio.Future[Any]) -> None:
    """Retrieve the future's error, so that Python does not log it as never retrieved."""
    if future.done() and not future.cancelled():
        future.exception()
