"""`JobWorker`: executes the jobs in a directory, one after the other, as one training that outlives its workers.

What a job changes is in the memory of the ranks until a `Save` has written it. So the jobs that change something stay in the
directory, executed, until then. A worker that follows another one loads the saved state and executes them again, which gives the
same bits; then it goes on with the job that the other one had not finished. A `Save` between two parts of a mini-batch lacks its
gradient, so what was executed before it stays, too.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import (
    ClosedError,
    DeadlineExceededError,
    TransportError,
    WeightlaneError,
    WorkerDiedError,
)

from ..engines.contract import ForwardBackward, Job, OptimStep
from .file_observers import append_line
from .job_files import JobFiles, TakenJob
from .jobs import CreateAdapter, DropGradient, Load, RemoveAdapter, RlStep, Save, SftStep
from .runner import Runner

_CHANGING = (CreateAdapter, RemoveAdapter, ForwardBackward, OptimStep, DropGradient, RlStep, SftStep, Load)
"""Jobs that change the state of the ranks."""
_OF_ADAPTERS = (CreateAdapter, RemoveAdapter)
"""Jobs that are executed again before a state is loaded, which has values for the adapters that there are."""
_OF_RANKS = (WorkerDiedError, ClosedError, TransportError, DeadlineExceededError)
"""Errors of the ranks and not of a job: the worker ends, and the next one executes the job."""
_DEATH_NOTICE_S = 5.0
"""Seconds to wait, after such an error, for the report that a process died, which explains it better."""
_POLL_S = 0.1
_log = logging.getLogger(__name__)


class JobWorker:
    """The worker of a directory, on a runner whose ranks have the model that the first job of all begins with.

    Args:
        files: The directory, of which this process is the worker (`JobFiles.take_turn`).
        runner: Executes the jobs.
        events: A JSON Lines file that gets a line when a job begins, is executed, fails, or is executed again.
        say: Prints a line about a job that fails.
    """

    def __init__(
        self, files: JobFiles, runner: Runner, events: Path | None = None, say: Callable[[str], None] = _log.info
    ) -> None:
        self._files, self._runner, self._events, self._say = files, runner, events, say

    async def run(self, ended: asyncio.Event, *, until_empty: bool = False) -> int:
        """Execute jobs until `ended` is set, or, with `until_empty`, none waits. Returns how many; a begun one is finished.

        A job that fails is set aside with its reason, and later ones are executed all the same.

        Raises:
            WorkerDiedError: A rank died, with or without a job. The job is executed by the next worker.
            WeightlaneError: The ranks cannot reach each other, or what earlier workers have done cannot be repeated.
        """
        working = asyncio.create_task(self._work(ended, until_empty=until_empty))
        watching = asyncio.create_task(self._runner.watch())
        try:
            await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and working.exception() is not None:
                await asyncio.wait({watching}, timeout=_DEATH_NOTICE_S)
            if watching.done():
                watching.result()
            return await working
        finally:
            for task in (working, watching):
                task.cancel()
            await asyncio.gather(working, watching, return_exceptions=True)

    async def _work(self, ended: asyncio.Event, *, until_empty: bool) -> int:
        await self._catch_up(ended)
        count = 0
        while not ended.is_set():
            if (taken := self._files.take()) is not None:
                await self._execute(taken)
                count += 1
            elif until_empty:
                break
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), _POLL_S)
        return count

    async def _catch_up(self, ended: asyncio.Event) -> None:
        """Bring the ranks to the state in which the worker before has left its own. `ended` ends that early."""
        saved, begun = self._files.note("saved"), self._files.note("begun")
        jobs = list(self._files.executed())
        if saved:  # a state is loaded into the adapters that it was saved with
            before = [each for each in jobs if each[0] < saved["job"] and isinstance(each[1], _OF_ADAPTERS)]
            await self._repeat(before, ended)
            if ended.is_set():
                return
            await self._runner.run(Load(Path(saved["directory"])))
            jobs = [each for each in jobs if each[0] > saved["job"]]
        await self._repeat(jobs, ended)
        if ended.is_set():
            return
        for taken in self._files.recover():
            if taken.name == saved.get("job"):  # its worker ended between the two last things that it does
                taken.done()
                continue
            if taken.name == begun.get("job"):
                for path in begun["creates"]:  # nothing was there before, so it is of that worker
                    await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            taken.requeue()

    async def _repeat(self, jobs: Sequence[tuple[str, Job[Any]]], ended: asyncio.Event) -> None:
        failed = {each.name for each in self._files.failed()}
        for name, job in jobs:
            if ended.is_set():
                return
            self._note("repeated", name, job)
            try:
                await self._runner.run(job)
            except WeightlaneError as error:
                if name not in failed or isinstance(error, _OF_RANKS):
                    raise

    async def _execute(self, taken: TakenJob) -> None:
        job: Job[Any] = taken.job
        changes, started = isinstance(job, _CHANGING), time.perf_counter()
        self._note("begun", taken.name, job)
        if written := self._runner.written_by(job):
            creates = [str(path) for path in written if not path.exists()]
            self._files.write_note("begun", {"job": taken.name, "creates": creates})
        try:
            result = await self._runner.run(job)
        except _OF_RANKS:
            raise
        except WeightlaneError as error:
            self._say(f"job {taken.name} ({job.kind}) failed: {error}")
            self._note("failed", taken.name, job, error=str(error))
            taken.fail(error, repeat=changes)
            return
        self._files.write_result(taken.name, result)
        if isinstance(job, Save):
            self._forget_saved(taken.name, job.directory)
        self._note("executed", taken.name, job, seconds=time.perf_counter() - started)
        taken.done(repeat=changes)

    def _forget_saved(self, name: str, directory: Path) -> None:
        """Forget what was executed before the `Save` of that name, unless a mini-batch was begun whose gradient it lacks."""
        executed, begun = list(self._files.executed()), set[str | None]()
        for _, job in executed:
            if isinstance(job, ForwardBackward):
                begun.add(job.adapter)
            elif isinstance(job, OptimStep | DropGradient):
                begun.discard(job.adapter)
            elif isinstance(job, Load):
                begun.clear()
        if begun:
            return
        self._files.write_note("saved", {"job": name, "directory": str(directory.resolve())})
        for each, job in executed:
            if not isinstance(job, _OF_ADAPTERS):
                self._files.forget_executed(each)

    def _note(self, event: str, name: str, job: Job[Any], **facts: Any) -> None:
        if self._events is not None:
            append_line(self._events, {"event": event, "job": name, "kind": job.kind, **facts})
