"""``weightlane tinker`` composes a service from its configuration, and ends everything it started."""

from __future__ import annotations

import asyncio
import logging
import logging.handlers
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from weightlane.ckpt_engines import WorkerDiedError
from weightlane.plugins import RunHooks
from weightlane.rollout.config import AdapterConfig
from weightlane.rollout.contract.registry import rollout_engine_class
from weightlane.rollout.layout.loading.adapter_tensors import adapted_layers
from weightlane.rollout.layout.loading.refused_arguments import refuse_arguments
from weightlane.sync import Rendezvous
from weightlane.trainer.algorithms.roles import POLICY
from weightlane.trainer.config import LoraConfig
from weightlane.trainer.dispatch.role_spec import RoleSpec
from weightlane.trainer.engines.hf.model_dir import ModelInfo, check_model_dir, find_model
from weightlane.trainer.engines.registry import check_trainer
from weightlane.trainer.runner.file_observers import MetricsFile
from weightlane.trainer.runner.run_dir import alone_in, refuse_taken
from weightlane.trainer.runner.runner import Runner
from weightlane.trainer.service.config import ServedModel
from weightlane.trainer.service.http.auth import Clients
from weightlane.trainer.service.http.server import listening, serve
from weightlane.trainer.service.service import Service

from ..config.run_config import VERSIONS_DIR, check_engine
from ..config.tinker_config import TinkerConfig, as_written, load_tinker_config
from ..config.validation import explain
from ..output import console, http_address
from ..run.open_observers import RunObservers
from ..run.processes import start_processes
from ..run.ray_cluster import RayCluster, refuse_loopback
from ..run.resources import Sizes, fitted, refuse_unfitting, reserved_cpus
from ..run.signals import point_to_logs

_T = TypeVar("_T")
_PART = "service"
_LOCK = "service.lock"
_KILLED_HINT = "Start the service again: it goes on from the files of run.dir."
_log = logging.getLogger("weightlane.service")
_HOUR_S = 3600.0
_LOG_BYTES = 64 << 20
"""Size of the log file, and of the metrics file, at which a new file begins."""


async def run_service(path: Path, overrides: Sequence[str]) -> None:
    """Serve the configuration at the absolute `path` until SIGINT or SIGTERM. Raises a typed error for every problem."""
    ended = _Ended()
    ready = prepare_service(path, overrides)
    config = ready.config
    say = console(soft_wrap=True).print
    directory = config.run.dir.resolve()
    async with AsyncExitStack() as stack:
        directory.mkdir(parents=True, exist_ok=True)
        stack.enter_context(alone_in(directory, _LOCK, "service"))
        _log_to(directory / "service.log")
        listener = stack.enter_context(listening(config.service.host, config.service.port))
        cpus = reserved_cpus(config)
        metrics = MetricsFile(directory / "metrics.jsonl", _LOG_BYTES)
        observers = RunObservers(config.observers, directory, [metrics], say, config.model_dump(mode="json"))
        hooks = stack.enter_context(observers)
        stack.enter_context(point_to_logs(directory / "logs", say))
        cluster = stack.enter_context(
            RayCluster(config.ray, cpus, directory / "logs", observers.environment, config.sync.host, _KILLED_HINT)
        )
        for number in (signal.SIGINT, signal.SIGTERM):  # after Ray, which sets handlers of its own
            asyncio.get_running_loop().add_signal_handler(number, ended.set_by, number)
        config = fitted(config, Sizes.of(config, ready.model), cluster.machines())
        (directory / "config.toml").write_text(explain(as_written(config)), encoding="utf-8")
        stack.callback(shutil.rmtree, directory / VERSIONS_DIR, ignore_errors=True)
        ready = replace(ready, config=config)
        deaths: list[float] = []
        has_served = False
        while True:
            try:
                async with AsyncExitStack() as life:
                    service = await _start_service(ready, hooks, say, ended, life)
                    has_served = True
                    url = http_address(*listener.getsockname()[:2])
                    say(f"serving {service.base.name} at {url} (TINKER_BASE_URL={url}); Ctrl-C ends it")
                    await serve(service, ready.clients, listener.dup(), ended)
                break
            except WorkerDiedError as error:
                deaths = [*(each for each in deaths if each > time.monotonic() - _HOUR_S), time.monotonic()]
                if not has_served or len(deaths) > config.service.restarts:
                    raise
                cluster.keep_logs()
                _log.error("starting again: %s", error)
                say(
                    f"{error.part}: {error.message} All are started again, and clients go on by themselves. Logs:"
                    f" {directory / 'logs'}"
                )
        cluster.succeeded()


@dataclass(frozen=True, slots=True)
class ServicePreparation:
    """The checked configuration of a service, before its first process starts."""

    config: TinkerConfig
    model: ModelInfo
    clients: Clients
    layers: Sequence[str]
    """Names of the layers that can have adapters; empty if models are all weights."""


def prepare_service(path: Path, overrides: Sequence[str]) -> ServicePreparation:
    """Read the configuration at `path`, and check everything that can be checked before a process starts."""
    config = load_tinker_config(path, overrides)
    refuse_taken(config.run.dir, _LOCK, "service")
    clients = Clients(config.service)
    here = not config.ray.address
    if here:
        check_engine(config)
    model = check_model_dir(find_model(config.model.path))
    adapter = config.rollout.adapter
    layers = () if adapter is None else tuple(adapted_layers(model.path, adapter))
    rollout_engine_class(config.rollout)  # refuses what the engine cannot do
    for rollout in config.rollout.by_size.values():
        refuse_arguments(rollout, model.path)
    check_trainer(config.trainer, model.path, here=here)
    refuse_loopback(config.ray, config.sync.host)
    refuse_unfitting(config, model)
    return ServicePreparation(config, model, clients, layers)


async def _start_service(
    ready: ServicePreparation, hooks: RunHooks, say: Callable[[str], None], ended: _Ended, life: AsyncExitStack
) -> Service:
    """Start trainer ranks and replicas, and a service over them; `life` ends everything."""
    config, model = ready.config, ready.model
    rendezvous = Rendezvous.host(config.sync.host, config.sync.port, config.sync.silence_s)
    roles = [RoleSpec(POLICY, config.trainer, model.path.resolve(), seed=config.run.seed)]
    starting = asyncio.create_task(start_processes(config, roles, rendezvous, hooks, say, life))
    dispatch, replicas, coordinator = await _unless(ended, starting)
    await _unless(ended, asyncio.create_task(coordinator.connect()))
    runner = Runner(dispatch, hooks=hooks)
    life.push_async_callback(runner.close)
    base = ServedModel(
        config.service.base_model or config.model.path,
        model.architecture,
        model.path.resolve(),
        model.vocab_size,
        min(replica.max_model_len for replica in replicas),
        model.eos_token_ids,
        {name.rpartition(".")[2]: _part_of(name) for name in ready.layers},
    )
    directory = config.run.dir.resolve()
    service = Service(
        config.service, directory, base, runner, coordinator, replicas, _announced, config.sync.deadline_s
    )
    life.push_async_callback(service.close)
    return service


def _announced(config: LoraConfig) -> AdapterConfig:
    return AdapterConfig(rank=config.rank, alpha=config.alpha, targets=config.targets)


def _part_of(layer: str) -> str:
    """``attention`` or ``mlp``, by the names that layers have in transformers."""
    return "attention" if "attn" in layer or "attention" in layer else "mlp"


class _Ended(asyncio.Event):
    """Set by the first SIGINT or SIGTERM."""

    error: type[BaseException]
    """The error by which that signal ends a command."""

    def set_by(self, number: int) -> None:
        """End the service because of signal `number`."""
        if not self.is_set():
            self.error = KeyboardInterrupt if number == signal.SIGINT else asyncio.CancelledError
        self.set()


async def _unless(ended: _Ended, task: asyncio.Task[_T]) -> _T:
    """Wait for `task` and return its result. Raises the error of a signal, if `ended` is set first."""
    waiting = asyncio.create_task(ended.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise ended.error
        return task.result()
    finally:
        waiting.cancel()


def _log_to(file: Path) -> None:
    """Append the service's log records to `file`. One older file is kept."""
    logger = logging.getLogger("weightlane.service")
    handler = logging.handlers.RotatingFileHandler(file, maxBytes=_LOG_BYTES, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
