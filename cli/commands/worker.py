"""``weightlane worker`` executes jobs from a directory or an object store: trainer ranks and a runner, without a loop."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from weightlane.plugins.prometheus import LOOPBACK
from weightlane.trainer.algorithms.composition import (
    algorithm_over,
    check_models,
    check_roles,
    policy_objective,
    role_specs,
)
from weightlane.trainer.algorithms.roles import POLICY
from weightlane.trainer.engines.hf.model_dir import ModelInfo, check_model_dir, find_model
from weightlane.trainer.engines.registry import training_engine_class
from weightlane.trainer.objectives.named import Objective
from weightlane.trainer.runner.job_queue.job_queue import JobQueue
from weightlane.trainer.runner.job_worker import JobWorker
from weightlane.trainer.runner.runner import Runner

from ..config.worker_config import WorkerConfig, load_worker_config
from ..output import console
from ..run.open_observers import RunObservers
from ..run.preparation import role_models
from ..run.processes import described_ranks, ray_dispatch
from ..run.ray_cluster import RayCluster, refuse_loopback
from ..run.resources import Machines, cpus_of, fitted_trainer
from ..run.signals import point_to_logs
from ..run.version_publishing import VersionPublishing

_KILLED_HINT = "Start a worker again: it goes on with the jobs."
_TURN_S = 0.5
"""Pause between two looks whether the directory's worker has ended."""


async def run_worker(path: Path, jobs: str, overrides: Sequence[str], *, until_empty: bool) -> int:
    """Execute the jobs in `jobs`, a directory or a URL, until SIGINT or SIGTERM, or until none waits. Returns how many.

    While another worker lives, this one waits for its end. Raises a typed error for every problem of configuration or execution.
    """
    ready = prepare_worker(path, overrides)
    config, algorithm = ready.config, ready.config.algorithm
    say = console(soft_wrap=True).print
    queue, workers = _opened(jobs, config)
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with AsyncExitStack() as stack:
        waits = False
        while (end_turn := queue.take_turn()) is None:
            if not waits:
                say(f"another worker executes the jobs in {jobs}; this one goes on when it has ended")
            waits = True
            await asyncio.sleep(_TURN_S)
            if ended.is_set():
                return 0
        stack.callback(end_turn)
        own = workers / f"{socket.gethostname()}-{os.getpid()}"
        own.mkdir(parents=True, exist_ok=True)
        settings = config.model_dump(mode="json")
        observers = RunObservers(config.observers, own, [], say, settings)
        hooks = stack.enter_context(observers)
        stack.enter_context(point_to_logs(own / "logs", say))
        cpus, host = cpus_of(config.rank_groups), None if config.checkpoint_engine is None else config.sync.host
        cluster = stack.enter_context(
            RayCluster(config.ray, cpus, own / "logs", observers.environment, host, _KILLED_HINT)
        )
        for number in (signal.SIGINT, signal.SIGTERM):  # again, because Ray sets handlers of its own
            asyncio.get_running_loop().add_signal_handler(number, ended.set)
        config = fitted_worker(config, cluster.machines())
        about = ready.models, ready.objective, config.reference
        roles = role_specs(algorithm, config.trainer, config.critic, *about, seed=config.worker.seed)
        dispatch = ray_dispatch(roles, config.rank_groups, None if config.ray.address else host or LOOPBACK)
        stack.push_async_callback(dispatch.close)
        await dispatch.start()
        runner = Runner(dispatch, algorithm_over(dispatch, algorithm, config.reference, own / "reference"), hooks=hooks)
        stack.push_async_callback(runner.close)
        publishing = None
        if config.checkpoint_engine is not None:
            dtype = ready.model.dtype if config.sync.wire_dtype == "auto" else config.sync.wire_dtype
            engine = config.checkpoint_engine, config.sync, config.rollouts
            publishing = VersionPublishing(dispatch[POLICY], *engine, dtype, hooks)
            stack.callback(publishing.close)
            await publishing.connect()
        ranks = described_ranks(config.rank_groups)
        say(f"executing the jobs in {jobs} on {ranks} ({config.trainer.engine}); Ctrl-C ends it")
        publish = None if publishing is None else publishing.publish
        worker = JobWorker(queue, runner, publish, config.worker.attempts, say)
        count = await worker.run(ended, until_empty=until_empty)
        cluster.succeeded()
    return count


def _opened(jobs: str, config: WorkerConfig) -> tuple[JobQueue, Path]:
    """The queue at `jobs`, and the directory in which workers have theirs."""
    section = config.worker
    if "://" in jobs:
        workers = section.dir or Path("workers")
        return JobQueue(jobs, section.storage_options, lease_s=section.lease_s), workers.resolve()
    directory = Path(jobs).resolve()
    return JobQueue(directory), (section.dir or directory / "workers").resolve()


def fitted_worker(config: WorkerConfig, machines: Machines, *, counted: bool = True) -> WorkerConfig:
    """Return `config` with the GPUs of its ranks: see `fitted_trainer`."""
    trainer = fitted_trainer(config.trainer, machines, config.rank_groups, counted=counted)
    return config.model_copy(update={"trainer": trainer})


@dataclass(frozen=True, slots=True)
class WorkerPreparation:
    """The checked configuration of a worker, and its models by role."""

    config: WorkerConfig
    model: ModelInfo
    models: Mapping[str, Path]
    objective: Objective


def prepare_worker(path: Path, overrides: Sequence[str]) -> WorkerPreparation:
    """Check the configuration at the absolute `path`, and its models. Raises a typed error for the first problem."""
    config = load_worker_config(path, overrides)
    check_roles(config.algorithm, config.trainer, config.critic, config.reference)
    training_engine_class(config.trainer.engine)
    here = not config.ray.address
    if config.checkpoint_engine is not None:
        refuse_loopback(config.ray, config.sync.host)
    model = check_model_dir(find_model(config.model.path))
    models = role_models(config, model)
    check_models(models, config.trainer, config.critic, config.reference, here=here)
    fitted_worker(config, Machines.here(), counted=here)
    objective = Objective(policy_objective(config.algorithm), [path.parent, Path()])
    return WorkerPreparation(config, model, models, objective)
