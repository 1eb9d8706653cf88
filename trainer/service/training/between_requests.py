"""`BetweenRequestQueue`: work for the trainer ranks between two requests, such as a publication for a sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from weightlane.ckpt_engines import DeadlineExceededError, WorkerDiedError

_WAIT_S = 600.0
"""Most seconds that a task waits until it begins."""


@dataclass(frozen=True, slots=True, eq=False)
class BetweenRequestTask:
    """Work to be done between two requests."""

    work: Callable[[], Awaitable[Any]]
    ready: Callable[[], bool]
    done: asyncio.Future[Any]


class BetweenRequestQueue:
    """The waiting tasks, oldest first. `changed` is called when one is added."""

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed, self._waiting, self._closed = changed, list[BetweenRequestTask](), False

    async def wait_for(self, work: Callable[[], Awaitable[Any]], ready: Callable[[], bool]) -> Any:
        """Queue `work`, which runs once it is `ready`, and return its result.

        Raises `DeadlineExceededError` if it had not begun within ten minutes.
        """
        task = BetweenRequestTask(work, ready, asyncio.get_running_loop().create_future())
        if self._closed:
            raise asyncio.CancelledError  # the caller's request stays in the store
        self._waiting.append(task)
        self._changed()
        try:
            await asyncio.wait([task.done], timeout=_WAIT_S)
        finally:
            begun = task not in self._waiting
            if not begun:
                self._waiting.remove(task)
        if not begun:
            raise DeadlineExceededError(
                f"the trainer ranks were not free within {_WAIT_S:.0f} s.",
                part="service training",
                hint="Another version is on its way, or the model that they have is amid a mini-batch: optim_step ends it.",
            )
        return await task.done

    def next(self) -> BetweenRequestTask | None:
        """The oldest task that is ready; None if there is none."""
        return next((each for each in self._waiting if each.ready()), None)

    async def run(self, task: BetweenRequestTask) -> None:
        """Run a task. Raises `WorkerDiedError`, which ends the service; the caller of `wait_for` gets any error."""
        self._waiting.remove(task)
        if task.done.cancelled():
            return
        try:
            result = await task.work()
        except asyncio.CancelledError:  # the service ends; the caller must not wait for ever
            task.done.cancel()
            raise
        except Exception as error:
            if not task.done.cancelled():
                task.done.set_exception(error)
            if isinstance(error, WorkerDiedError):
                raise
        else:
            if not task.done.cancelled():
                task.done.set_result(result)

    def close(self) -> None:
        """Cancel all waiting tasks, and refuse new ones. The requests that wait for them stay in the store."""
        self._closed = True
        waiting, self._waiting = self._waiting, []
        for task in waiting:
            task.done.cancel()
