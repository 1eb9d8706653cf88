"""`Runner`: executes jobs on the models of a dispatch, one after the other, in the order in which they were submitted.

`weightlane train`, `weightlane sft` and programs that drive the training from outside submit jobs to it:

    runner = Runner(dispatch)
    computing = runner.submit(ForwardBackward(batch, "objective"))
    stepping = runner.submit(OptimStep())  # queued behind it
    answer, step = await computing, await stepping
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from weightlane.ckpt_engines import ClosedError, ConfigError, WeightlaneError, as_weightlane_error
from weightlane.ckpt_engines.runtime.process_memory import MemoryUse
from weightlane.plugins import RunHooks, process_hooks

from ..algorithms.policy_gradient import PolicyGradient
from ..algorithms.roles import POLICY
from ..algorithms.step import take_step
from ..data.batch import MiniBatch, TokenBatch
from ..data.step_result import StepResult
from ..dispatch.dispatch import WorkerDispatch
from ..objectives.supervised import sft
from . import jobs
from .jobs import Job

_PART = "runner"
_T = TypeVar("_T")


@dataclass(slots=True)
class JobFigures:
    """Running totals of one kind of jobs."""

    count: int = 0
    """Jobs that ended, failed ones included."""
    failures: int = 0
    seconds: float = 0.0
    """Time of their execution."""
    waited_s: float = 0.0
    """Time that they waited for earlier jobs."""
    tokens: int = 0
    """Tokens of their batches."""


@dataclass(slots=True)
class _Submitted:
    job: Job[Any]
    answer: asyncio.Future[Any]
    since: float


class Runner:
    """Executes jobs on a dispatch that was started. It is the only caller of the dispatch's roles that trains.

    A failed job raises a `WeightlaneError` to its caller, and later jobs are executed all the same. A job whose caller stops
    waiting before its turn (a cancelled `run`) is dropped; a job that has begun is finished. The hook ``job_finished`` reports
    every job that ends, and `figures` count it. To be used from one event loop. The runner implements
    `weightlane.trainer.loop.protocols.SharedTrainers` for the fully-async loop: a step, a publication and a save are jobs, too.

    Args:
        dispatch: Has the role `POLICY`.
        algorithm: Executes `RlStep`, `Save` and `Load`; by default `PolicyGradient` over `dispatch`.
        hooks: Notified of every job that ends; by default those of the process.
    """

    def __init__(
        self,
        dispatch: WorkerDispatch,
        algorithm: PolicyGradient | None = None,
        *,
        hooks: RunHooks | None = None,
    ) -> None:
        self._dispatch, self._policy = dispatch, dispatch[POLICY]
        self._algorithm = algorithm or PolicyGradient(dispatch)
        self._hooks = hooks or process_hooks()
        self._calls = self._calls_by_job()
        self._waiting: deque[_Submitted] = deque()
        self._working: asyncio.Task[None] | None = None
        self._closed = False
        self.figures: defaultdict[str, JobFigures] = defaultdict(JobFigures)
        """Totals by kind of job, of all that have ended so far."""

    def submit(self, job: Job[_T]) -> asyncio.Future[_T]:
        """Queue `job` behind all that were submitted before. Returns a future of its result.

        Raises `ClosedError` after `close`.
        """
        if self._closed:
            raise _closed()
        answer: asyncio.Future[_T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Submitted(job, answer, time.perf_counter()))
        if self._working is None or self._working.done():
            self._working = asyncio.create_task(self._work(), name="runner")
        return answer

    async def run(self, job: Job[_T]) -> _T:
        """Execute `job` after those that were submitted before, and return its result."""
        return await self.submit(job)

    async def train_step(self, batch: TokenBatch, mini_batches: Sequence[MiniBatch] = ()) -> StepResult:
        """See `Trainers.train_step`."""
        return await self.run(jobs.RlStep(batch, mini_batches))

    async def publish(self, version: int) -> float:
        """See `Trainers.publish`."""
        return await self.run(jobs.Publish(version))

    async def offload(self) -> None:
        """See `SharedTrainers.offload`. To be called between jobs."""
        await self._dispatch.offload()

    async def memory_use(self) -> dict[str, MemoryUse]:
        """See `SharedTrainers.memory_use`. To be called between jobs."""
        return await self._dispatch.memory_use()

    def written_by(self, job: Job[Any]) -> list[Path]:
        """The directories that `job` creates; none for most jobs."""
        if isinstance(job, jobs.Save):
            return self._algorithm.state_paths(job.directory)
        return [job.directory] if isinstance(job, jobs.Export | jobs.SaveAdapter) else []

    async def watch(self) -> NoReturn:
        """Raise `WorkerDiedError` when a process of any rank dies."""
        await self._dispatch.watch()

    async def close(self) -> None:
        """Fail the jobs that have not ended with `ClosedError`. Ranks finish what they compute. Idempotent; never raises."""
        self._closed = True
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)
        while self._waiting:
            _fail(self._waiting.popleft(), _closed())

    async def _work(self) -> None:
        while self._waiting:
            submitted = self._waiting.popleft()
            if submitted.answer.done():  # its caller has stopped waiting
                continue
            try:
                result = await self._counted(submitted)
            except WeightlaneError as error:
                _fail(submitted, error)
            except asyncio.CancelledError:
                _fail(submitted, _closed())
                raise
            else:
                if not submitted.answer.done():
                    submitted.answer.set_result(result)

    async def _counted(self, submitted: _Submitted) -> Any:
        """Execute a job, report it to the hooks, and count it. Raises only `WeightlaneError`."""
        job, began = submitted.job, time.perf_counter()
        error: WeightlaneError | None = None
        try:
            return await self._call(job)
        except WeightlaneError as known:
            error = known
            raise
        except Exception as cause:
            error = as_weightlane_error(cause, f"job {job.kind}")
            raise error from cause
        finally:
            seconds, waited_s = time.perf_counter() - began, began - submitted.since
            tokens = sum(_tokens(part) for part in (job.parts if isinstance(job, jobs.JointJob) else [job]))
            figures = self.figures[job.kind]
            figures.count += 1
            figures.failures += error is not None
            figures.seconds += seconds
            figures.waited_s += waited_s
            figures.tokens += tokens
            facts = {
                "seconds": seconds,
                "waited_s": waited_s,
                "tokens": tokens,
                "adapter": getattr(job, "adapter", None) or "",
                "error": str(error or ""),
            }
            self._hooks.job_finished(kind=job.kind, facts=facts)

    def _call(self, job: Job[Any]) -> Awaitable[Any]:
        if type(job) not in self._calls:
            raise ConfigError(f"there is no job of the type {type(job).__name__}.", part=_PART)
        return self._calls[type(job)](job)

    def _calls_by_job(self) -> dict[type[Job[Any]], Callable[[Any], Awaitable[Any]]]:
        """The call that each kind of jobs makes."""
        policy, algorithm = self._policy, self._algorithm
        return {
            jobs.CreateAdapter: lambda job: policy.add_adapter(
                job.name, job.config, job.source, optimizer=job.optimizer
            ),
            jobs.RemoveAdapter: lambda job: policy.remove_adapter(job.name),
            jobs.SaveAdapter: lambda job: policy.export_adapter(job.directory, job.name, with_optimizer=job.optimizer),
            jobs.Forward: lambda job: policy.forward(job.batch, job.outputs, job.top_k, job.adapter),
            jobs.ForwardBackward: lambda job: policy.forward_backward(
                job.batch, job.loss, job.denominators, job.outputs, job.adapter
            ),
            jobs.OptimStep: lambda job: policy.optim_step(job.adapter, job.params),
            jobs.JointJob: lambda job: policy.together(job.parts),
            jobs.FailMiniBatch: lambda job: policy.fail_mini_batch(job.reason, job.adapter),
            jobs.DropGradient: lambda job: policy.drop_gradient(job.adapter),
            jobs.RlStep: lambda job: algorithm.train_step(job.batch, job.mini_batches),
            jobs.SftStep: lambda job: take_step(policy, job.batch, sft, job.denominators),
            jobs.Save: lambda job: algorithm.save(job.directory),
            jobs.Load: lambda job: algorithm.load(job.directory, optimizer=job.optimizer),
            jobs.Export: lambda job: policy.export_hf(job.directory, job.dtype),
            jobs.Publish: lambda job: policy.publish(job.version, job.adapter),
        }


def _tokens(job: Job[Any]) -> int:
    batch = getattr(job, "batch", None)
    return sum(sequence.length for sequence in batch.sequences) if batch is not None else 0


def _fail(submitted: _Submitted, error: WeightlaneError) -> None:
    if not submitted.answer.done():
        submitted.answer.set_exception(error)


def _closed() -> ClosedError:
    return ClosedError("the runner was closed before this job ended.", part=_PART)
