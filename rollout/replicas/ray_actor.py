"""`RolloutReplica`: a `LocalReplica` in its own Ray actor, on this machine or another."""

from __future__ import annotations

import asyncio
import inspect
import math
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from weightlane.ckpt_engines import (
    ConfigError,
    DeadlineExceededError,
    WeightlaneError,
    WorkerDiedError,
    as_weightlane_error,
    error_from_wire,
)
from weightlane.ckpt_engines.runtime.process_memory import MemoryUse
from weightlane.sync import CommitReport

from ..config import AdapterConfig, RolloutConfig
from ..contract.engine import SleepPart
from ..contract.records import Completion, RolloutStats
from ..contract.registry import rollout_engine_class
from .local_replica import LocalReplica

_GRACE_S = 15.0
"""Seconds by which a call may exceed the replica's own deadline: for the transport, and the replica's clean-up."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """The result of a call, or its typed error as plain data: Ray would wrap an exception in a class made at run time."""

    value: Any = None
    error: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class SharedDevices:
    """The GPUs of one replica whose processes share them with trainer ranks, which have reserved them."""

    node_id: str
    """Ray's id of their node."""
    gpus: str = ""
    """The value of ``CUDA_VISIBLE_DEVICES``, in the order of the replica's ranks; empty without GPUs."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that give the replica these GPUs. Ray would hide them from an actor that has reserved none."""
        if not self.gpus:
            return {}
        return {"CUDA_VISIBLE_DEVICES": self.gpus, "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}

    @classmethod
    def of(cls, ranks: Sequence[tuple[str, str]], config: RolloutConfig) -> list[SharedDevices]:
        """Give each replica the devices of as many neighbouring trainer ranks as it has ranks itself.

        `ranks` are the node and the GPUs of each trainer rank. Raises `ConfigError` if a replica's would be on several nodes.
        """
        found, size = [], config.tensor_parallel
        # On a machine without GPUs, trainer ranks may be fewer.
        for index in range(config.replicas):
            mine = [ranks[number % len(ranks)] for number in range(index * size, (index + 1) * size)]
            if len({node for node, _ in mine}) > 1:
                raise ConfigError(
                    f"replica {index} has {size} ranks, and the trainer ranks whose devices it shares are on several nodes.",
                    part="rollout replica",
                    hint="Lower rollout.tensor_parallel to a number that divides the GPUs of a node.",
                )
            found.append(cls(mine[0][0], ",".join(dict.fromkeys(gpus for _, gpus in mine if gpus))))
        return found


class ReplicaActor(LocalReplica):
    """The Ray actor: a replica whose errors are returned instead of raised."""

    def facts(self) -> tuple[int, str, int]:
        """This process's id, the dtype of the engine, which has started, and its longest sequence."""
        return os.getpid(), self.dtype, self.max_model_len

    async def call(self, method: str, *args: Any, **kwargs: Any) -> _Outcome:
        """Call one of the replica's methods."""
        try:
            value = getattr(self, method)(*args, **kwargs)
            return _Outcome(await value if inspect.isawaitable(value) else value)
        except Exception as error:  # noqa: BLE001 - the caller raises it
            return _Outcome(error=as_weightlane_error(error, self.name).to_wire())


class RolloutReplica:
    """The loop's handle of one replica. Every method but `watch` ends by a deadline.

    Each method raises the errors of the `LocalReplica` method of the same name, `WorkerDiedError` if the actor is gone, and
    `DeadlineExceededError` if the actor does not answer.
    """

    def __init__(self, name: str, config: RolloutConfig, actor: Any) -> None:
        self.name = name
        self.config = config
        self.pid: int | None = None
        self.dtype = ""
        """The dtype that the replica computes in; known once it has started."""
        self.max_model_len = 0
        """Most tokens of a prompt and its completion together; known once the replica has started."""
        self._actor = actor

    @classmethod
    def place(
        cls,
        name: str,
        config: RolloutConfig,
        model_dir: str | os.PathLike[str],
        *,
        initial_version: int = 0,
        shared: SharedDevices | None = None,
    ) -> RolloutReplica:
        """Ask Ray, which must be initialized, for an actor with the config's resources; `start` waits for it.

        With `shared`, the replica uses these GPUs, which others have reserved, on their node.
        """
        import ray  # noqa: PLC0415 - optional, and slow to import
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415 - as above

        ranks = config.tensor_parallel
        placement = "DEFAULT" if shared is None else NodeAffinitySchedulingStrategy(shared.node_id, soft=False)
        actor_class = ray.remote(
            num_cpus=config.cpus_per_rank * ranks,
            num_gpus=(config.gpus_per_rank or 0) * ranks if shared is None else 0,
            max_restarts=0,
            max_concurrency=max(1000, 2 * config.concurrency),
            scheduling_strategy=placement,
            runtime_env={
                "env_vars": rollout_engine_class(config).environment(config) | (shared.environment if shared else {})
            },
        )(ReplicaActor)
        return cls(name, config, actor_class.remote(name, config, str(Path(model_dir).resolve()), initial_version))

    def subscriber_names(self) -> list[str]:
        """The names under which the replica's ranks subscribe."""
        return [f"{self.name}/{rank}" for rank in range(self.config.tensor_parallel)]

    async def start(self) -> None:
        """Wait until the engine serves."""
        await self._call("start", self.config.start_limit_s)
        self.pid, self.dtype, self.max_model_len = await self._call("facts", _GRACE_S)

    async def connect(
        self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any] | None = None
    ) -> None:
        """See `LocalReplica.connect`."""
        await self._call("connect", self.config.connect_timeout_s, dict(rendezvous), backend, dict(options or {}))

    async def announce(self, version: int, adapter: AdapterConfig, keep: Collection[int] = ()) -> None:
        """See `LocalReplica.announce`."""
        await self._call("announce", _GRACE_S, version, adapter, tuple(keep))

    async def generate(
        self, request_id: str, prompt_ids: Sequence[int], max_new_tokens: int, **options: Any
    ) -> Completion:
        """See `LocalReplica.generate`."""
        limit_s = self.config.request_timeout_s
        completion: Completion = await self._call(
            "generate", limit_s, request_id, list(prompt_ids), max_new_tokens, **options
        )
        return completion

    async def generate_group(self, prompt_ids: Sequence[int], **options: Any) -> list[Completion | WeightlaneError]:
        """See `LocalReplica.generate_group`."""
        limit_s = self.config.request_timeout_s
        answers: list[Completion | WeightlaneError]
        answers = await self._call("generate_group", limit_s, list(prompt_ids), **options)
        return answers

    async def watch(self) -> NoReturn:
        """Raise `WorkerDiedError` when the actor's process or its engine dies. The one call without a deadline."""
        await self._call("watch", math.inf)
        raise AssertionError("watch() never returns")

    async def commit(self, version: int) -> CommitReport:
        """See `LocalReplica.commit`."""
        report: CommitReport = await self._call("commit", self.config.commit_timeout_s, version)
        return report

    async def sleep(self) -> None:
        """See `LocalReplica.sleep`."""
        await self._call("sleep", self.config.request_timeout_s + self.config.commit_timeout_s)

    async def wake(self, part: SleepPart) -> None:
        """See `LocalReplica.wake`."""
        await self._call("wake", self.config.commit_timeout_s, part)

    async def memory_use(self) -> Sequence[MemoryUse]:
        """See `LocalReplica.memory_use`."""
        use: Sequence[MemoryUse] = await self._call("memory_use", self.config.commit_timeout_s)
        return use

    async def rollback(self, version: int) -> None:
        """See `LocalReplica.rollback`."""
        await self._call("rollback", self.config.commit_timeout_s, version)

    async def quarantine(self, error: WeightlaneError) -> None:
        """See `LocalReplica.quarantine`."""
        await self._call("quarantine", _GRACE_S, error)

    async def stats(self) -> RolloutStats:
        """See `LocalReplica.stats`."""
        stats: RolloutStats = await self._call("stats", _GRACE_S)
        return stats

    async def close(self) -> None:
        """End the engine, then the actor; never raises. The engine's processes end even when the actor must be killed."""
        import ray  # noqa: PLC0415 - as above

        with suppress(WeightlaneError):
            await self._call("close", _GRACE_S)
        with suppress(Exception):  # Ray was shut down before, and the actor with it.
            ray.kill(self._actor, no_restart=True)

    async def _call(self, method: str, limit_s: float, *args: Any, **kwargs: Any) -> Any:
        """Call one of the replica's methods, whose own deadline is `limit_s` seconds. Raises its typed error."""
        import ray  # noqa: PLC0415 - as above
        from ray.exceptions import RayActorError  # noqa: PLC0415

        call = self._actor.call.remote(method, *args, **kwargs)
        try:
            async with asyncio.timeout(limit_s + _GRACE_S if limit_s < math.inf else None):
                answer: _Outcome = await call
        except asyncio.CancelledError:
            ray.cancel(call)  # A commit that its caller gave up on must not take effect unnoticed.
            raise
        except TimeoutError as cause:
            ray.cancel(call)
            raise DeadlineExceededError(
                f"{method} was not answered within {limit_s + _GRACE_S:.0f} s.", part="rollout replica", peer=self.name
            ) from cause
        except RayActorError as cause:
            process = f" (process {self.pid})" if self.pid is not None else ""
            raise WorkerDiedError(
                f"{self.name}{process} died during {method}.",
                part="rollout replica",
                peer=self.name,
                hint="Ray's logs have the cause.",
            ) from cause
        if answer.error is not None:
            raise error_from_wire(answer.error)
        return answer.value


async def start_replicas(
    config: RolloutConfig,
    model_dir: str | os.PathLike[str],
    *,
    initial_version: int = 0,
    shared: Sequence[SharedDevices] = (),
) -> list[RolloutReplica]:
    """Start ``config.replicas`` replicas at the same time, named ``rollout-<index>``, on `shared` devices if there are any.

    If a replica cannot start, the others are closed and its error is raised.
    """
    replicas = [
        RolloutReplica.place(
            f"rollout-{index}",
            each,
            model_dir,
            initial_version=initial_version,
            shared=shared[index] if shared else None,
        )
        for index, each in enumerate(config.each)
    ]
    try:
        async with asyncio.TaskGroup() as starting:
            for replica in replicas:
                starting.create_task(replica.start())
    except BaseException as failure:
        await asyncio.gather(*(replica.close() for replica in replicas))
        if isinstance(failure, BaseExceptionGroup):
            raise failure.exceptions[0] from None
        raise
    return replicas
