"""The fully-async training loop.

Generation, training and syncing run beside each other: the feeder keeps the replicas busy within the staleness budget, the
trainer takes groups as they come, and the version keeper carries new weights over without either side waiting for the
other. The loop sees rollouts, trainers and the coordinator through `weightlane.trainer.protocols` only, and any transport
through the registry that the run's configuration names.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from weightlane.ckpt_engines import WorkerDiedError
from weightlane.plugins import RunHooks
from weightlane.sync import SyncReport

from .config import AlgorithmConfig
from .feeder import Judge, RolloutFeeder
from .fleet import Fleet, Successor
from .group import Group, staleness, to_batch
from .loop_config import LoopConfig
from .loop_state import LoopState
from .overlap import OverlapClock
from .protocols import Newcomer, Rollout, StepReport, Syncer, Tokenizer, Trainers
from .staleness import StalenessBudget
from .summary import RunFigures, RunSummary
from .tasks import Task, TaskStream
from .version_keeper import VersionKeeper

TRAINING = "training"
"""Name of the activity on the `OverlapClock`."""

_DEATH_NOTICE_S = 5.0
"""How long a failed call waits for the news that a process behind it died: the better explanation."""


@dataclass(frozen=True, slots=True)
class LoopParts:
    """Everything the loop drives."""

    trainers: Trainers
    rollouts: Sequence[Rollout]
    syncer: Syncer
    tokenizer: Tokenizer
    stop_token_ids: Sequence[int]
    judge: Judge
    train_tasks: Sequence[Task]
    heldout_tasks: Sequence[Task]
    hooks: RunHooks
    save: Callable[[LoopState], Coroutine[Any, Any, None]]
    """Makes the run resumable from the given state."""
    quorum: float = 1.0
    """Share of the replicas that must be left for the run to go on."""
    succeed: Successor | None = None
    """Starts a replica in the place of one that died; None if nobody is replaced."""
    max_successors: int = 0
    """How many at most."""


class AsyncLoop:
    """One run, from its first published version to its last evaluation.

    Args:
        parts: What to drive.
        config: Length and staleness.
        algorithm: Objective and sampling.
        seed: Order of the tasks.
        concurrency: Requests in flight per replica.
        resume: State to go on from; the trainers must have loaded theirs already.
    """

    def __init__(
        self,
        parts: LoopParts,
        config: LoopConfig,
        algorithm: AlgorithmConfig,
        *,
        seed: int,
        concurrency: int,
        resume: LoopState | None = None,
    ) -> None:
        self._parts = parts
        self._config = config
        self._algorithm = algorithm
        self._step = resume.step if resume else 0
        self._clock = OverlapClock()
        self._stream = TaskStream(parts.train_tasks, seed)
        self._fleet = Fleet(
            parts.rollouts,
            parts.syncer,
            quorum=parts.quorum,
            hooks=parts.hooks,
            succeed=parts.succeed,
            max_successors=parts.max_successors,
            on_ready=self._on_ready,
            on_change=self._on_change,
        )
        self._feeder = RolloutFeeder(
            self._fleet,
            self._stream,
            parts.tokenizer,
            parts.judge,
            algorithm,
            stop_token_ids=parts.stop_token_ids,
            budget=StalenessBudget(config.max_staleness, algorithm.prompts_per_step, self._step),
            clock=self._clock,
            groups_per_replica=concurrency // algorithm.group_size,
        )
        if resume:
            self._stream.restore(resume.stream)
            self._feeder.requeue([_task_from(plain) for plain in resume.outstanding])
        self._keeper = VersionKeeper(
            parts.trainers,
            parts.syncer,
            on_commit=self._on_commit,
            max_failures=config.max_failed_syncs,
        )
        self._figures = RunFigures(self._keeper.times)

    async def run(self) -> RunSummary:
        """Run to the last step.

        A replica that dies is missed by nobody while enough are left; see `Fleet`. Raises `WorkerDiedError` naming who died
        otherwise, or what else ended the run.
        """
        started = time.perf_counter()
        watched = [self._parts.trainers.watch(), self._fleet.watch()]
        watchers = [asyncio.create_task(watching) for watching in watched]
        try:
            await self._until_done(self._main(), watchers)
        except BaseException as error:
            self._parts.hooks.run_ended(facts={"error": str(error)})
            raise
        finally:
            await self._keeper.cancel()
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
        self._figures.wall_s = time.perf_counter() - started
        summary = self._figures.summary()
        self._parts.hooks.run_ended(facts=summary.to_plain())
        return summary

    async def _until_done(self, main: Coroutine[Any, Any, None], watchers: Sequence[asyncio.Task[Any]]) -> None:
        task = asyncio.create_task(main, name="loop")
        try:
            await asyncio.wait([task, *watchers], return_when=asyncio.FIRST_COMPLETED)
            if task.done() and (task.cancelled() or task.exception() is None):
                return
            # A call failed, or a process died. Dying explains failing, so give the news a moment to arrive.
            dead, _ = await asyncio.wait(watchers, timeout=_DEATH_NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
            for watcher in dead:
                watcher.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        raise _innermost(task.exception())

    async def _main(self) -> None:
        await self._keeper.publish_blocking(self._step)
        self._figures.accuracy_before = await self._evaluate()
        self._parts.hooks.run_started(facts={"step": self._step, "steps": self._config.steps})
        self._clock.restart()
        feeding = asyncio.create_task(self._feeder.run(), name="feeder")
        training = asyncio.create_task(self._train(), name="trainer")
        following = asyncio.create_task(self._keeper.watch(), name="version-keeper-watch")
        tasks: list[asyncio.Task[None]] = [training, feeding, following]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._figures.overlap_share = self._clock.share_together()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if not task.cancelled():
                task.result()
        await self._keeper.drain(self._step)
        await self._save()
        self._figures.accuracy_after = await self._evaluate()
        for rollout in self._fleet.living:
            with suppress(WorkerDiedError):  # it does not matter any more
                stats = await rollout.stats()
                self._figures.max_token_gap_s = max(self._figures.max_token_gap_s, stats.max_token_gap_s)
        self._figures.replicas_lost, self._figures.replicas_replaced = self._fleet.losses, self._fleet.successions

    async def _train(self) -> None:
        while self._step < self._config.steps:
            async with self._keeper.between_steps(self._step):
                waited = time.perf_counter()
                groups = await self._feeder.take(self._step)
                waited = time.perf_counter() - waited
            batch = to_batch(
                groups, normalize_std=self._algorithm.normalize_std, temperature=self._algorithm.temperature
            )
            with self._clock.busy(TRAINING):
                report = await self._parts.trainers.train_step(batch)
            self._report_step(groups, report, waited)
            self._step = report.step
            self._feeder.trained(groups)
            if len(self._figures.blocking_way_s) < self._config.blocking_syncs:
                self._figures.blocking_way_s.append(await self._keeper.publish_blocking(self._step))
            if (
                self._config.save_every
                and self._step % self._config.save_every == 0
                and self._step < self._config.steps
            ):
                await self._save()

    async def _save(self) -> None:
        outstanding = [task.as_mapping() for task in self._feeder.outstanding()]
        await self._parts.save(LoopState(self._step, self._stream.state(), outstanding))

    async def _evaluate(self) -> float | None:
        """Mean reward of greedy completions of held-out tasks: exact-match accuracy under an exact-match reward."""
        tasks = self._parts.heldout_tasks[: self._config.evaluate_tasks]
        if not tasks:
            return None
        started = time.perf_counter()
        groups = await asyncio.gather(*(self._feeder.answer(task, self._step, turn) for turn, task in enumerate(tasks)))
        accuracy = sum(group.rewards[0] for group in groups) / len(groups)
        facts = {"accuracy": accuracy, "tasks": len(tasks), "seconds": time.perf_counter() - started}
        self._parts.hooks.evaluated(step=self._step, facts=facts)
        return accuracy

    def _report_step(self, groups: Sequence[Group], report: StepReport, waited_s: float) -> None:
        published = self._keeper.note_fence(report.fence_s)
        rewards = [reward for group in groups for reward in group.rewards]
        mean_staleness, max_staleness = staleness(groups, self._step)
        wall = self._clock.wall_s()
        facts = {
            "seconds": report.seconds,
            "reward": sum(rewards) / len(rewards),
            "staleness_mean": mean_staleness,
            "staleness_max": max_staleness,
            "grad_norm": report.grad_norm,
            "fence_s": report.fence_s,
            "waited_for_rollouts_s": waited_s,
            "tokens": sum(group.tokens for group in groups),
            "tokens_per_s": self._feeder.generated_tokens / wall if wall else 0.0,
            "dropped_groups": self._feeder.dropped_groups,
            "overlap_share": self._clock.share_together(),
            **published,
            **report.metrics,
        }
        self._parts.hooks.training_step(step=report.step, facts=facts)

    async def _on_commit(self, report: SyncReport) -> None:
        self._fleet.committed(report)
        await self._feeder.version_committed(report.version)

    def _on_ready(self, name: str, newcomer: Newcomer) -> None:
        self._feeder.add(newcomer)
        self._keeper.join(name, newcomer)

    def _on_change(self) -> None:
        self._feeder.replicas_changed()
        self._keeper.catch_up()


def _task_from(plain: Mapping[str, Any]) -> Task:
    extra = {key: value for key, value in plain.items() if key not in ("prompt", "answer")}
    return Task(plain["prompt"], plain["answer"], extra)


def _innermost(error: BaseException | None) -> BaseException:
    """The first real error inside the exception groups of task groups; one about a dead worker before any other."""
    if isinstance(error, BaseExceptionGroup):
        errors = [_innermost(inner) for inner in error.exceptions]
        return next((inner for inner in errors if isinstance(inner, WorkerDiedError)), errors[0])
    return error or RuntimeError("the loop ended without a result")
