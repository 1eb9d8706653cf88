"""`JobJoiner`: makes one joint job of the jobs of several concurrent tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from .jobs import ForwardBackward, JointJob, OptimStep
from .runner import Runner

RunJob = Callable[[ForwardBackward | OptimStep], Awaitable[Any]]
"""Executes a job and returns its result."""


class JobJoiner:
    """Executes jobs of several tasks, each for its own adapter, as one `JointJob` once all tasks have called `run` or `leave`.

    There are `tasks` of them. Each calls `run` any number of times, and `leave` at its end, even after an error.
    """

    def __init__(self, runner: Runner, tasks: int) -> None:
        self._runner, self._tasks = runner, tasks
        self._waiting: list[tuple[ForwardBackward | OptimStep, asyncio.Future[Any]]] = []
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, job: ForwardBackward | OptimStep) -> Any:
        """Execute a task's job together with those of the other tasks. Returns its result, or raises its own error."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append((job, answer))
        self._run_if_complete()
        return await answer

    def leave(self) -> None:
        """Stop the other tasks from waiting for this one."""
        self._tasks -= 1
        self._run_if_complete()

    def _run_if_complete(self) -> None:
        if self._waiting and len(self._waiting) >= self._tasks:
            waiting, self._waiting = self._waiting, []
            running = asyncio.get_running_loop().create_task(self._run(waiting))
            self._running.add(running)
            running.add_done_callback(self._running.discard)

    async def _run(self, waiting: list[tuple[ForwardBackward | OptimStep, asyncio.Future[Any]]]) -> None:
        jobs = [job for job, _ in waiting]
        try:
            if len(jobs) > 1:
                results: list[Any] = await self._runner.run(JointJob(tuple(jobs)))
            else:
                results = [await self._runner.run(jobs[0])]
        except Exception as error:  # noqa: BLE001 - each task gets it
            results = [error] * len(jobs)
        for (_, answer), result in zip(waiting, results, strict=True):
            if answer.done():  # its task was cancelled
                continue
            if isinstance(result, Exception):
                answer.set_exception(result)
            else:
                answer.set_result(result)
