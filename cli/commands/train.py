"""``weightlane train`` composes a run from its configuration, and ends everything it started."""

from __future__ import annotations

import gc
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, closing
from pathlib import Path

from weightlane.ckpt_engines.runtime.threads import DaemonThreads
from weightlane.rollout.replicas.ray_actor import RolloutReplica
from weightlane.sync import Rendezvous
from weightlane.trainer.algorithms.composition import algorithm_over, role_specs
from weightlane.trainer.data.rewards import RewardPool
from weightlane.trainer.engines.hf.model_dir import ModelInfo
from weightlane.trainer.loop.environments.player import Player
from weightlane.trainer.loop.fleet import Fleet
from weightlane.trainer.loop.loop import AsyncLoop
from weightlane.trainer.loop.protocols import LoopParts, LoopState, StartReplica
from weightlane.trainer.loop.summary import RunSummary
from weightlane.trainer.runner.file_observers import FailuresFile, MetricsFile, SamplesFile, draw_curves
from weightlane.trainer.runner.jobs import Export, Save
from weightlane.trainer.runner.runner import Runner

from ..config.run_config import VERSIONS_DIR, RunConfig
from ..config.validation import explain
from ..fleet.fleet_control import FleetControl
from ..fleet.room import RoomFollower, ask_ray, check_replicas
from ..output import console
from ..run.display import RunDisplay, print_summary
from ..run.open_observers import RunObservers
from ..run.preparation import Preparation, prepare
from ..run.processes import start_processes
from ..run.ray_cluster import RayCluster
from ..run.resources import Sizes, fitted, reserved_cpus
from ..run.run_description import about_run
from ..run.signals import cancel_on_sigterm, point_to_logs, start_ray


async def run_training(path: Path, overrides: Sequence[str], *, resume: bool, live: bool) -> RunSummary:
    """Run the configuration at the absolute `path`. Raises a typed error for every problem of configuration or run."""
    cancel_on_sigterm()
    ready = prepare(path, overrides, resume=resume)
    config, model, run_dir, state = ready.config, ready.model, ready.run_dir, ready.state
    rendezvous = Rendezvous.host(config.sync.host, config.sync.port, config.sync.silence_s)

    shown = console(soft_wrap=False)
    display = RunDisplay(shown, config.loop.steps, live=live)
    metrics = run_dir.path / "metrics.jsonl"
    async with AsyncExitStack() as stack:
        stack.enter_context(run_dir.owned())
        run_dir.write_text("config.toml", explain(config))
        stack.enter_context(point_to_logs(run_dir.path / "logs", display.say))
        stack.callback(display.stop)
        # The observers close after the cluster, because the trace is complete only when every process has ended.
        samples, failures = SamplesFile(run_dir.path / "samples.jsonl"), FailuresFile(run_dir.path / "failures.jsonl")
        own = [MetricsFile(metrics), samples, failures, display]
        observers = RunObservers(
            config.observers, run_dir.path.resolve(), own, display.say, config.model_dump(mode="json")
        )
        hooks = stack.enter_context(observers)
        cluster = RayCluster(
            config.ray, reserved_cpus(config), run_dir.path / "logs", observers.environment, config.sync.host
        )
        await start_ray(stack, cluster)
        config = fitted(config, Sizes.of(config, model), cluster.machines())
        run_dir.write_text("config.toml", explain(config))
        stack.callback(shutil.rmtree, run_dir.path / VERSIONS_DIR, ignore_errors=True)
        dispatch, replicas, coordinator = await start_processes(
            config,
            role_specs(
                config.algorithm,
                config.trainer,
                config.critic,
                ready.role_models,
                ready.objective,
                config.reference,
                seed=config.run.seed,
                state=run_dir.trainer_state(state.step) if state else None,
            ),
            rendezvous,
            hooks,
            display.say,
            stack,
            state.step if state else 0,
        )
        algorithm = algorithm_over(dispatch, config.algorithm, config.reference, run_dir.path / "reference.new")
        runner = Runner(dispatch, algorithm, hooks=hooks)
        stack.push_async_callback(runner.close)
        await coordinator.connect()
        # Otherwise each collection would traverse every object of the start, and stop the loop for a third of a second.
        gc.collect()
        gc.freeze()
        judge = stack.enter_context(closing(RewardPool(ready.reward, config.reward)))

        async def save(loop_state: LoopState) -> None:
            await runner.run(Save(run_dir.begin_state(loop_state.step)))
            run_dir.finish_state(loop_state.step, loop_state.to_plain())

        async def export(step: int) -> None:
            last = step == config.loop.steps
            await runner.run(Export(run_dir.begin_export(step, last=last), model.dtype))
            run_dir.finish_export(last=last)

        longest = min(replica.max_model_len for replica in replicas)
        parts = LoopParts(
            trainers=runner,
            rollouts=replicas,
            syncer=coordinator,
            tokenizer=ready.tokenizer,
            stop_token_ids=model.eos_token_ids,
            judge=judge,
            train_tasks=ready.train_tasks,
            heldout_tasks=ready.heldout_tasks,
            hooks=hooks,
            save=save,
            export=export,
            quorum=config.sync.quorum,
            shared=runner if config.trainer.colocate else None,
            start_replica=_starter(config, model, state.step if state else 0, rendezvous, stack, cluster.keep_logs),
            max_replacements=config.rollout.max_replacements if config.rollout.replace_dead else 0,
            follows_room=config.rollout.autoscale,
            min_replicas=config.rollout.min_replicas,
            drain_s=config.rollout.drain_timeout_s,
            max_model_len=longest,
            player=_player(ready, judge, longest, stack),
            advantages=ready.advantages,
        )
        loop = AsyncLoop(
            parts,
            config.loop,
            config.algorithm,
            seed=config.run.seed,
            concurrency=config.rollout.concurrency,
            resume=state,
            curriculum=config.data.curriculum != "off",
        )

        async with _changing_fleet(loop.fleet, config, cluster, run_dir.path, display.say):
            summary = await loop.run()
        if not summary.replicas_lost:
            cluster.succeeded()
    run_dir.write_json("summary.json", {"run": about_run(config, model, path), **summary.to_plain()})
    if metrics.is_file():  # its observer is disabled if it cannot write
        draw_curves(metrics, run_dir.path / "curves.png")
    print_summary(shown, summary, str(run_dir.path))
    if summary.replicas_lost:
        display.say(f"logs of the run's processes: {run_dir.path / 'logs'}")
    return summary


@asynccontextmanager
async def _changing_fleet(
    fleet: Fleet, config: RunConfig, cluster: RayCluster, path: Path, say: Callable[[str], None]
) -> AsyncIterator[None]:
    """Let ``weightlane scale`` change the number of replicas inside the block, or with ``rollout.autoscale`` the machines."""

    async def check(replicas: int) -> None:
        machines, cpus = await ask_ray(threads, lambda: (cluster.machines(), cluster.cpus))
        check_replicas(config, replicas, machines, cpus)

    async with AsyncExitStack() as stack:
        threads = DaemonThreads(1, "weightlane-ray")
        stack.callback(threads.shutdown)
        await stack.enter_async_context(FleetControl(path, fleet, check, say).following())
        if config.rollout.autoscale:
            follower = RoomFollower(fleet, config.rollout, lambda: ask_ray(threads, cluster.room))
            await stack.enter_async_context(follower.following(say))
        yield


def _player(ready: Preparation, judge: RewardPool, longest: int, stack: AsyncExitStack) -> Player | None:
    """Return the player of the run's environment, which `stack` closes; None if it has none."""
    if ready.environment is None:
        return None
    stack.push_async_callback(ready.environment.close)
    return Player(
        ready.environment,
        ready.config.environment,
        ready.config.algorithm,
        tokenizer=ready.tokenizer,
        stop_token_ids=ready.model.eos_token_ids,
        judge=judge,
        max_model_len=longest,
    )


def _starter(
    config: RunConfig,
    model: ModelInfo,
    version: int,
    rendezvous: Rendezvous,
    stack: AsyncExitStack,
    keep_logs: Callable[[], None],
) -> StartReplica:
    """Return a function that starts a further replica, which begins with `version`, and which `stack` closes.

    `keep_logs` is called when one cannot start.
    """
    engine = config.checkpoint_engine

    async def start_replica(name: str) -> RolloutReplica:
        replica = RolloutReplica.place(name, config.rollout.of_replica(name), model.path, initial_version=version)
        stack.push_async_callback(replica.close)
        try:
            await replica.start()
            await replica.connect(rendezvous.address.to_plain(), engine.backend, engine.options)
        except BaseException as error:
            if isinstance(error, Exception):
                keep_logs()
            await replica.close()
            raise
        return replica

    return start_replica
