"""The fully-async training loop.

Generation, training and syncing run concurrently: the feeder keeps the replicas busy within the staleness budget, the trainer
takes groups as they become ready, and the version keeper syncs new weights without either side waiting for the other. The loop
uses rollouts, trainers and the coordinator only through `weightlane.trainer.loop.protocols`, and is independent of the
transport, which the run's configuration names.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from weightlane.ckpt_engines import GradientError, WorkerDiedError
from weightlane.sync import SyncReport

from ..data.step_result import StepResult
from ..data.tasks import Task, TaskStream
from ..objectives.config import AlgorithmConfig
from .config import LoopConfig
from .failures import STEP, Failures
from .fleet import Fleet
from .generation.evaluation import Evaluator
from .generation.group_generator import Lengths
from .generation.rollout_feeder import RolloutFeeder
from .prompt_group import PromptGroup, episode_figures, staleness, to_batch, version_runs
from .protocols import LoopParts, LoopState, Rollout
from .sampling.curriculum import Curriculum
from .sampling.staleness_budget import StalenessBudget
from .sampling.tally import SampleTally
from .summary import OverlapClock, RunSummary
from .turns import Turns
from .version_keeper import VersionKeeper

TRAINING = "training"
"""Name of the training activity on the `OverlapClock`."""

_DEATH_NOTICE_S = 5.0
"""Seconds to wait, after a failed call, for the report that a process died, which explains the failure better."""


class AsyncLoop:
    """One run, from its first published version to its last evaluation.

    `concurrency` is the number of requests in flight per replica. With `resume`, the trainers must have loaded their state.
    With `curriculum`, tasks are drawn by their success rates.
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
        curriculum: bool = False,
    ) -> None:
        self._takes_turns = parts.shared is not None
        if parts.shared is not None:
            turns = Turns(parts.shared, parts.syncer, parts.rollouts, parts.hooks)
            parts = replace(parts, trainers=turns, syncer=turns, start_replica=None)
        self._parts = parts
        self._config = config
        self._algorithm = algorithm
        self._step = resume.step if resume else 0
        self._clock = OverlapClock()
        stream: type[TaskStream[Task]] = Curriculum if curriculum else TaskStream
        self._stream = stream(parts.train_tasks, seed)
        self._keeper = VersionKeeper(
            parts.trainers, parts.syncer, on_commit=self._on_commit, max_failures=config.max_failed_syncs
        )
        self._fleet = Fleet(parts, on_ready=self._on_ready, on_change=self._on_change, leave=self._keeper.leave)
        largest = max(algorithm.group_size, *(task.group_size for task in parts.train_tasks))
        self._failures = Failures(config.max_failed_share, parts.hooks, largest)
        self._feeder = RolloutFeeder(
            parts,
            self._fleet,
            self._stream,
            algorithm,
            budget=StalenessBudget(config.max_staleness, algorithm.prompts_per_step, self._step),
            late=config.late_groups,
            clock=self._clock,
            failures=self._failures,
            concurrency=concurrency,
        )
        if resume:
            self._stream.restore(resume.stream, may_change=True)  # the caller has checked the data
            self._feeder.requeue([Task.from_plain(plain) for plain in resume.outstanding])
        self._trained, self._trained_rewards = Lengths(), SampleTally()
        self._told = SampleTally()
        """Counts of drawn groups that were reported to observers."""
        self._first = self._saved = self._exported = self._step
        self._evaluator = Evaluator(
            self._feeder, parts.heldout_tasks, config, most_requests=concurrency * len(parts.rollouts)
        )
        self._evaluating: asyncio.Task[dict[str, Any] | None] | None = None
        self._evaluation_failed: asyncio.Future[None]
        """Completed only if an evaluation during training has failed, with its error."""
        self._timed = 0
        """Number of synchronous updates so far, aborted ones included."""
        self._reported = 0
        """Number of versions whose cost to the replicas was reported to observers."""
        self._summary = RunSummary(self._keeper.times)

    @property
    def fleet(self) -> Fleet:
        """The replicas, whose number may change while `run` runs."""
        return self._fleet

    async def run(self) -> RunSummary:
        """Run to the last step.

        The run survives the death of a replica while enough are left; see `Fleet`. Otherwise it raises `WorkerDiedError`,
        which names the dead process, or the error that ended the run.
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
        self._summary.wall_s = time.perf_counter() - started
        self._parts.hooks.run_ended(facts=self._summary.to_plain())
        return self._summary

    async def _until_done(self, main: Coroutine[Any, Any, None], watchers: Sequence[asyncio.Task[Any]]) -> None:
        task = asyncio.create_task(main, name="loop")
        try:
            await asyncio.wait([task, *watchers], return_when=asyncio.FIRST_COMPLETED)
            if task.done() and not task.cancelled() and task.exception() is None:
                return
            # A call failed, or a process died. A death explains a failed call, so wait a moment for its report.
            dead, _ = await asyncio.wait(watchers, timeout=_DEATH_NOTICE_S, return_when=asyncio.FIRST_COMPLETED)
            for watcher in dead:
                watcher.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        raise _innermost(None if task.cancelled() else task.exception())

    async def _main(self) -> None:
        if self._takes_turns and self._step >= self._config.steps:
            await self._write_last()  # of a resumed run without a step that could do it
        await self._keeper.publish_blocking(self._step)
        self._summary.measured_before = await self._evaluate(self._step)
        self._parts.hooks.run_started(facts={"step": self._step, "steps": self._config.steps})
        self._clock.restart()
        self._evaluation_failed = asyncio.get_running_loop().create_future()
        feeding = asyncio.create_task(self._feeder.run(), name="feeder")
        training = asyncio.create_task(self._train(), name="trainer")
        following = asyncio.create_task(self._keeper.watch(), name="version-keeper-watch")
        tasks: list[asyncio.Future[Any]] = [training, feeding, following, self._evaluation_failed]
        try:
            ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._summary.overlap_share = self._clock.share_together()
            if self._evaluating is not None:
                tasks.append(self._evaluating)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in tasks:
            if task in ended or not task.cancelled():
                task.result()
        await self._keeper.drain(self._step)
        if not self._takes_turns:
            await self._write_last()
        summary = self._summary
        summary.measured_after = await self._evaluate(self._step)
        totals = list(self._fleet.departed)
        for rollout in self._fleet.living:
            with suppress(WorkerDiedError):  # a death no longer matters here
                totals.append(await rollout.stats())
        for stats in totals:
            summary.max_token_gap_s = max(summary.max_token_gap_s, stats.max_token_gap_s)
            summary.generated_tokens += stats.tokens
            summary.recomputed_tokens += stats.recomputed_tokens
        summary.replicas_lost, summary.replicas_replaced = self._fleet.losses, self._fleet.successions
        summary.replicas_added, summary.replicas_left = self._fleet.additions, self._fleet.departures
        summary.drawn_tokens, summary.trained_tokens = self._feeder.drawn.mean, self._trained.mean
        if isinstance(self._stream, Curriculum):
            summary.success_of_tasks = self._stream.mean_rate
        summary.drawn, summary.reward_trained = self._feeder.tally, self._trained_rewards.mean_reward
        summary.dropped_groups, summary.failures = self._feeder.dropped_groups, dict(self._failures.counts)

    async def _train(self) -> None:
        while self._step < self._config.steps:
            async with self._keeper.between_steps(self._step):
                if not self._takes_turns:
                    await self._write_due()
                waited = time.perf_counter()
                groups = await self._feeder.take(self._step)
                waited = time.perf_counter() - waited
            masks = self._config.late_groups == "mask"
            oldest = self._step - self._config.max_staleness if masks else None
            batch, mini_batches = to_batch(groups, self._algorithm, oldest, self._parts.advantages)
            if self._takes_turns and self._evaluating is not None:
                await asyncio.wait([self._evaluating])  # the rollouts are about to sleep
            with self._clock.busy(TRAINING):
                report = await self._parts.trainers.train_step(batch, mini_batches)
            if report.skipped:
                error = GradientError(report.skipped, part="trainer")
                self._failures.failed(STEP, error, step=self._step + 1, tasks=[group.task.prompt for group in groups])
                await self._feeder.wasted(groups)
                continue
            self._failures.well(STEP)
            for group in groups:
                targets = group.without_overlong() if self._algorithm.overlong == "mask" else group
                self._trained.add(targets, -1 if oldest is None else oldest)
                self._trained_rewards.add_rewards(targets.rewards)
            self._report_step(groups, report, waited)
            self._step += 1
            self._feeder.trained(groups)
            if self._takes_turns:  # while the state is on the device
                await (self._write_due() if self._step < self._config.steps else self._write_last())
            if self._is_due(self._config.evaluate_every):
                self._begin_evaluation()
            if self._is_timed():
                self._timed += 1
                seconds = await self._keeper.time_blocking(self._step)
                self._summary.synchronous_updates_s += [] if seconds is None else [seconds]
            else:
                self._summary.steps += 1

    async def _write_due(self) -> None:
        """Save the state, and export the model, if they are due. A version that is due goes first, unless turns are taken."""
        if self._config.save_every and self._step >= self._saved + self._config.save_every:
            await self._keeper.handed_over(self._step)
            await self._save()
        if self._is_due(self._config.export_every) and self._exported != self._step:
            self._exported = self._step
            await self._keeper.handed_over(self._step)
            await self._parts.export(self._step)

    async def _write_last(self) -> None:
        if self._saved != self._step:  # the resumed state is the newest one, until another one is complete
            await self._save()
        await self._parts.export(self._step)

    def _is_timed(self) -> bool:
        """Whether the trainer waits for this version, to time a synchronous update. These versions are spread over the run."""
        wanted, steps = self._config.blocking_syncs, self._config.steps - self._first
        return self._timed < wanted and self._step - self._first >= (self._timed + 1) * steps // (wanted + 1)

    def _is_due(self, every: int) -> bool:
        """Whether an action that happens every `every` steps is due now. At the end of a run all of them happen anyway."""
        return every > 0 and self._first < self._step < self._config.steps and self._step % every == 0

    def _begin_evaluation(self) -> None:
        """Start an evaluation during training, unless the previous one still runs."""
        if self._evaluating is None or self._evaluating.done():
            self._evaluating = asyncio.create_task(self._evaluate(), name="evaluation")
            self._evaluating.add_done_callback(self._evaluation_ended)

    def _evaluation_ended(self, evaluation: asyncio.Task[dict[str, Any] | None]) -> None:
        error = None if evaluation.cancelled() else evaluation.exception()
        if error is not None and not self._evaluation_failed.done():
            self._evaluation_failed.set_exception(error)

    async def _save(self) -> None:
        self._saved = self._step
        outstanding = [task.to_plain() for task in self._feeder.outstanding()]
        await self._parts.save(LoopState(self._step, self._stream.state(), outstanding))

    async def _evaluate(self, version: int | None = None) -> dict[str, Any] | None:
        step = self._step
        facts = await self._evaluator.measure(version)
        if facts is not None:
            self._parts.hooks.evaluated(step=step, facts=facts)
        return facts

    def _report_step(self, groups: Sequence[PromptGroup], report: StepResult, waited_s: float) -> None:
        published = self._keeper.note_fence(report.fence_s)
        committed = self._keeper.times.synced[self._reported :]
        self._reported += len(committed)
        rewards = [reward for group in groups for reward in group.rewards]
        mean_staleness, max_staleness = staleness(groups, self._step)
        wall = self._clock.wall_s()
        drawn = self._feeder.tally.since(self._told)
        self._told = self._feeder.tally.copy()
        facts = {
            "seconds": report.seconds,
            "reward": sum(rewards) / len(rewards),
            "staleness_mean": mean_staleness,
            "staleness_max": max_staleness,
            "grad_norm": report.grad_norm,
            "optimizer_steps": report.step,
            "fence_s": report.fence_s,
            "waited_for_rollouts_s": waited_s,
            **drawn.to_plain(),
            "tokens": sum(group.tokens for group in groups),
            "tokens_per_s": self._feeder.generated_tokens / wall if wall else 0.0,
            "dropped_groups": self._feeder.dropped_groups,
            "failed_items": self._failures.counts.total(),
            "length_ratio": self._trained.mean / self._feeder.drawn.mean,
            "overlap_share": self._clock.share_together(),
            "rollout_blocked_s": sum(each.rollout_blocked_s for each in committed),
            **published,
            **({"synchronous_update_s": median_s} if (median_s := self._summary.synchronous_update_s) else {}),
            **report.metrics,
            **(episode_figures(groups) if self._parts.player else {}),
        }
        self._parts.hooks.training_step(step=self._step + 1, facts=facts)
        samples = [
            {
                "prompt": group.task.prompt,
                "completion": played.text,
                "reward": played.reward,
                "versions": version_runs(played.trajectory.versions),
                **({"turns": len(played.trajectory.turns), "ended": played.ended} if self._parts.player else {}),
            }
            for group in groups
            for played in group.episodes
        ]
        if self._config.samples_per_step:
            # Spread over the batch, so that not all are of one prompt.
            apart = max(1, len(samples) // self._config.samples_per_step)
            some = samples[::apart][: self._config.samples_per_step]
            self._parts.hooks.samples_trained(step=self._step + 1, facts={"samples": some})

    async def _on_commit(self, report: SyncReport) -> None:
        self._fleet.committed(report)
        await self._feeder.version_committed(report.version)

    def _on_ready(self, name: str, newcomer: Rollout) -> None:
        self._feeder.add(newcomer)
        self._keeper.join(name, newcomer)

    def _on_change(self) -> None:
        self._feeder.replicas_changed()
        self._keeper.catch_up()


def _innermost(error: BaseException | None) -> BaseException:
    """The first real error inside the exception groups of task groups; a `WorkerDiedError` takes precedence over any other."""
    if isinstance(error, BaseExceptionGroup):
        errors = [_innermost(inner) for inner in error.exceptions]
        return next((inner for inner in errors if isinstance(inner, WorkerDiedError)), errors[0])
    return error or RuntimeError("the loop ended without a result")
