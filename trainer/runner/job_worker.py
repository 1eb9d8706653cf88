"""`JobWorker`: executes the jobs of a queue, one after the other, as one training that outlives its workers.

What a job changes is in the memory of the ranks until a `Save` has written it. So the jobs that change something stay in the
queue, executed, until then. A worker that follows another one loads the saved state and executes them again, which gives the
same bits; then it goes on with the job that the other one had not finished. A `Save` between two parts of a mini-batch lacks its
gradient, so what was executed before it stays, too. A job during which several workers have ended is set aside.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import NoneType
from typing import Any, NoReturn

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    StorageError,
    SyncAbortedError,
    TransportError,
    WeightlaneError,
    WorkerDiedError,
)

from ..engines.contract import ForwardBackward, Job, OptimStep
from .job_queue.job_queue import JobQueue, TakenJob
from .jobs import CreateAdapter, DropGradient, FailMiniBatch, Load, Publish, RemoveAdapter, RlStep, Save, SftStep
from .runner import Runner

_CHANGING = (CreateAdapter, RemoveAdapter, ForwardBackward, OptimStep, DropGradient, RlStep, SftStep, Load)
"""Jobs that change the state of the ranks."""
_OF_ADAPTERS = (CreateAdapter, RemoveAdapter)
"""Jobs that are executed again before a state is loaded, which has values for the adapters that there are."""
_OF_RANKS = (WorkerDiedError, ClosedError, TransportError, DeadlineExceededError)
"""Errors of the ranks and not of a job: the worker ends, and the next one executes the job."""
_DEATH_NOTICE_S = 5.0
"""Seconds to wait, after such an error, for the report that a process died, which explains it better."""
_TURN_S = 1.0
"""Seconds between two looks whether this worker still has its turn."""
_PART = "job worker"
_log = logging.getLogger(__name__)


class JobWorker:
    """The worker of a queue, on a runner whose ranks have the model that the first job of all begins with.

    Events of the queue tell when a job begins, is executed, fails, or is executed again.

    Args:
        jobs: The queue, of which this process is the worker (`JobQueue.take_turn`).
        runner: Executes the jobs.
        publish: Brings a version, which the ranks have just published, into service; None if they publish nowhere.
        attempts: How many workers may end while they execute a job: it is set aside then.
        say: Prints a line about a job that fails.
    """

    def __init__(
        self,
        jobs: JobQueue,
        runner: Runner,
        publish: Callable[[int], Awaitable[object]] | None = None,
        attempts: int = 3,
        say: Callable[[str], None] = _log.info,
    ) -> None:
        self._jobs, self._runner, self._publish = jobs, runner, publish
        self._attempts, self._say = attempts, say

    async def run(self, ended: asyncio.Event, *, until_empty: bool = False) -> int:
        """Execute jobs until `ended` is set, or, with `until_empty`, none waits. Returns how many; a begun one is finished.

        A job that fails is set aside with its reason, and later ones are executed all the same.

        Raises:
            WorkerDiedError: A rank died, with or without a job. The job is executed by the next worker.
            StorageError: The turn was lost, or the queue refuses. The next worker goes on.
            WeightlaneError: The ranks cannot reach each other, or what earlier workers have done cannot be repeated.
        """
        working = asyncio.create_task(self._work(ended, until_empty=until_empty))
        watching, checking = asyncio.create_task(self._runner.watch()), asyncio.create_task(self._check_turn())
        try:
            await asyncio.wait({working, watching, checking}, return_when=asyncio.FIRST_COMPLETED)
            if working.done() and not isinstance(working.exception(), StorageError | NoneType):
                await asyncio.wait({watching}, timeout=_DEATH_NOTICE_S)
            for noticing in (watching, checking):
                if noticing.done():
                    noticing.result()
            return await working
        finally:
            for task in (working, watching, checking):
                task.cancel()
            await asyncio.gather(working, watching, checking, return_exceptions=True)

    async def _check_turn(self) -> NoReturn:
        while True:
            self._jobs.check_turn()
            await asyncio.sleep(_TURN_S)

    async def _work(self, ended: asyncio.Event, *, until_empty: bool) -> int:
        await self._catch_up(ended)
        count = 0
        while not ended.is_set():
            if (taken := self._jobs.take()) is not None:
                await self._execute(taken)
                count += 1
            elif until_empty:
                break
            else:
                with suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), self._jobs.worker_poll_s)
        return count

    async def _catch_up(self, ended: asyncio.Event) -> None:
        """Bring the ranks to the state in which the worker before has left its own. `ended` ends that early."""
        saved, begun = self._jobs.note("saved"), self._jobs.note("begun")
        jobs = list(self._jobs.executed())
        if saved:  # a state is loaded into the adapters that it was saved with
            before = [each for each in jobs if each[0] in saved["before"]]
            await self._repeat([each for each in before if isinstance(each[1], _OF_ADAPTERS)], ended)
            if ended.is_set():
                return
            await self._runner.run(Load(Path(saved["directory"])))
            jobs = [each for each in jobs if each not in before]
        await self._repeat(jobs, ended)
        if ended.is_set():
            return
        for taken in self._jobs.recover():
            if taken.name == saved.get("job"):  # its worker ended between the two last things that it does
                self._jobs.write_result(taken.name, None)  # that of every `Save`
                self._jobs.end_job(taken.name)
                continue
            if taken.name == begun.get("job"):
                for path in begun["creates"]:  # nothing was there before, so it is of that worker
                    await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            ended_by = self._jobs.note("attempts")
            count = 1 + (ended_by["count"] if ended_by.get("job") == taken.name else 0)
            if count < self._attempts:
                self._jobs.write_note("attempts", {"job": taken.name, "count": count})
                self._jobs.requeue()
            else:
                await self._set_aside(taken, count)

    async def _set_aside(self, taken: TakenJob, count: int) -> None:
        """Set aside a job that has ended `count` workers."""
        error = WorkerDiedError(
            f"{count} workers ended while they executed this job.",
            part=_PART,
            hint="The logs of the workers have the causes. If it was not the job, submit it again.",
        )
        instead = _in_place_of(taken.job)
        self._fail(taken, error, repeat=instead is not None)
        if instead is not None:
            await self._runner.run(instead)

    async def _repeat(self, jobs: Sequence[tuple[str, Job[Any]]], ended: asyncio.Event) -> None:
        failed = {each.name: each.error for each in self._jobs.failed()}
        for name, job in jobs:
            if ended.is_set():
                return
            self._note("repeated", name, job)
            again = _in_place_of(job) if isinstance(failed.get(name), WorkerDiedError) else job
            try:
                if again is not None:
                    await self._runner.run(again)
            except WeightlaneError as error:
                if name not in failed or isinstance(error, _OF_RANKS):
                    raise

    async def _execute(self, taken: TakenJob) -> None:
        job: Job[Any] = taken.job
        changes, started = isinstance(job, _CHANGING), time.perf_counter()
        self._note("begun", taken.name, job)
        if written := self._runner.written_by(job):
            creates = [str(path) for path in written if not path.exists()]
            self._jobs.write_note("begun", {"job": taken.name, "creates": creates})
        try:
            result = await self._run(job)
        except _OF_RANKS:
            raise
        except WeightlaneError as error:
            if isinstance(error, SyncAbortedError):  # a rank may have died, which ends this worker
                await asyncio.sleep(_DEATH_NOTICE_S)
            self._fail(taken, error, repeat=changes)
            return
        self._jobs.write_result(taken.name, result)
        if isinstance(job, Save):
            self._forget_saved(taken.name, job.directory)
        self._note("executed", taken.name, job, seconds=time.perf_counter() - started)
        self._jobs.end_job(taken.name, repeat=changes)

    async def _run(self, job: Job[Any]) -> Any:
        if not isinstance(job, Publish):
            return await self._runner.run(job)
        if self._publish is None:
            raise ConfigError(
                "this worker publishes nowhere.",
                part=_PART,
                hint="Give its configuration a section [checkpoint_engine].",
            )
        blocked_s = await self._runner.run(job)
        try:
            await self._publish(job.version)
        except DeadlineExceededError as error:  # of the store or the servers, not of the ranks
            raise StorageError(str(error), part=_PART, hint=error.hint) from error
        return blocked_s

    def _fail(self, taken: TakenJob, error: WeightlaneError, *, repeat: bool) -> None:
        self._say(f"job {taken.name} ({taken.job.kind}) failed: {error}")
        self._note("failed", taken.name, taken.job, error=str(error))
        self._jobs.end_job(taken.name, error, repeat=repeat)

    def _forget_saved(self, name: str, directory: Path) -> None:
        """Forget what was executed before the `Save` of that name, unless a mini-batch was begun whose gradient it lacks."""
        executed, begun = list(self._jobs.executed()), set[str | None]()
        for _, job in executed:
            if isinstance(job, ForwardBackward):
                begun.add(job.adapter)
            elif isinstance(job, OptimStep | DropGradient):
                begun.discard(job.adapter)
            elif isinstance(job, Load):
                begun.clear()
        if begun:
            return
        before = [each for each, _ in executed]
        self._jobs.write_note("saved", {"job": name, "directory": str(directory.resolve()), "before": before})
        self._jobs.forget_executed([each for each, job in executed if not isinstance(job, _OF_ADAPTERS)])

    def _note(self, event: str, name: str, job: Job[Any], **facts: Any) -> None:
        try:
            self._jobs.write_event({"event": event, "job": name, "kind": job.kind, **facts})
        except (StorageError, DeadlineExceededError) as error:  # a job is worth more than the report of it
            self._jobs.check_turn()
            self._say(f"the event {event} of job {name} is not reported: {error}")


def _in_place_of(job: Job[Any]) -> Job[Any] | None:
    """The job that stands in for a changing job that was set aside and never finished; None if none is needed.

    The mini-batch that the job belongs to has failed, as if the job had.
    """
    if isinstance(job, ForwardBackward):
        return FailMiniBatch("a part of it was set aside, because workers ended while they executed it.", job.adapter)
    return DropGradient(job.adapter) if isinstance(job, OptimStep) else None
