"""`JobWorker`: executes the jobs in a directory, one after the other, as one training that outlives its workers.

What a job changes is in the memory of the ranks until a `Save` has written it. So the jobs that change something stay in the
directory, executed, until then. A worker that follows another one loads the saved state and executes them again, which gives the
same bits; then it goes on with the job that the other one had not finished.
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

from weightlane.ckpt_engines import ClosedError, WeightlaneError, WorkerDiedError

from ..engines.contract import ForwardBackward, Job, OptimStep
from .file_observers import append_line
from .job_files import JobFiles, TakenJob
from .jobs import CreateAdapter, DropGradient, Load, RemoveAdapter, RlStep, Save, SftStep
from .runner import Runner

_CHANGING = (CreateAdapter, RemoveAdapter, ForwardBackward, OptimStep, DropGradient, RlStep, SftStep, Load)
"""Jobs that change the state of the ranks."""
_ATTEMPTS = 3
"""Workers that may end while they execute the same job, before it is set aside."""
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
            WorkerDiedError: A rank died. The job is executed by the next worker.
            WeightlaneError: What earlier workers have done cannot be repeated.
        """
        await self._catch_up()
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

    async def _catch_up(self) -> None:
        """Bring the ranks to the state in which the worker before has left its own."""
        saved, begun = self._files.note("saved"), self._files.note("begun")
        jobs = list(self._files.executed())
        if saved:  # a state is loaded into the adapters that it was saved with
            await self._repeat([each for each in jobs if each[0] < saved["job"]])
            await self._runner.run(Load(Path(saved["directory"])))
            jobs = [each for each in jobs if each[0] > saved["job"]]
        await self._repeat(jobs)
        for taken in self._files.recover():
            if taken.name == saved.get("job"):  # its worker ended between the two last things that it does
                taken.done()
                continue
            attempts = int(self._files.note("attempts").get(taken.name, 0)) + 1
            self._files.write_note("attempts", {taken.name: attempts})
            if taken.name == begun.get("job"):
                for path in begun["creates"]:  # nothing was there before, so it is of that worker
                    await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)
            if attempts >= _ATTEMPTS:
                ended = WorkerDiedError(f"{attempts} workers ended while they executed it.", part="job worker")
                self._set_aside(taken, ended, repeat=False)
            else:
                taken.requeue()

    async def _repeat(self, jobs: Sequence[tuple[str, Job[Any]]]) -> None:
        failed = {each.name for each in self._files.failed()}
        for name, job in jobs:
            self._note("repeated", name, job)
            try:
                await self._runner.run(job)
            except WeightlaneError as error:
                if name not in failed or isinstance(error, WorkerDiedError | ClosedError):
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
        except (WorkerDiedError, ClosedError):
            raise
        except WeightlaneError as error:
            self._set_aside(taken, error, repeat=changes)
            return
        self._files.write_result(taken.name, result)
        if isinstance(job, Save):
            self._files.write_note("saved", {"job": taken.name, "directory": str(job.directory.resolve())})
            for name, each in list(self._files.executed()):
                if name < taken.name and not isinstance(each, CreateAdapter | RemoveAdapter):
                    self._files.forget_executed(name)
        self._note("executed", taken.name, job, seconds=time.perf_counter() - started)
        taken.done(repeat=changes)

    def _set_aside(self, taken: TakenJob, error: WeightlaneError, *, repeat: bool) -> None:
        self._say(f"job {taken.name} ({taken.job.kind}) failed: {error}")
        self._note("failed", taken.name, taken.job, error=str(error))
        taken.fail(error, repeat=repeat)

    def _note(self, event: str, name: str, job: Job[Any], **facts: Any) -> None:
        if self._events is not None:
            append_line(self._events, {"event": event, "job": name, "kind": job.kind, **facts})
