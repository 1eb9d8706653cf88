"""Starts the trainer ranks and rollout replicas of a configuration, and connects them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack

from weightlane.plugins import RunHooks
from weightlane.rollout.replicas.ray_actor import RolloutReplica, SharedDevices, start_replicas
from weightlane.sync import Coordinator, Rendezvous, dtype_name, dtype_of
from weightlane.trainer.algorithms.roles import POLICY
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.ray_ranks import RayRanks
from weightlane.trainer.dispatch.role_spec import POLICY_GROUP, RoleSpec

from ..config.run_config import ClusterConfig, wire_dtype


def ray_dispatch(
    roles: Sequence[RoleSpec],
    groups: Mapping[str, TrainerConfig],
    host: str | None,
    ranks: Mapping[str, RayRanks] | None = None,
) -> WorkerDispatch:
    """Return a dispatch of `roles` on groups of ranks in Ray, with the engine settings of each. `host` is that of `RayRanks`.

    With ``trainer.offload_roles`` or ``trainer.colocate``, the policy takes turns on its ranks' device; roles on ranks of their
    own need not. By default the ranks are new ones.
    """
    ranks = ranks or ray_ranks(groups, host)
    policy = groups[POLICY_GROUP]
    return WorkerDispatch(roles, ranks, {POLICY_GROUP: policy.offload_roles or policy.colocate})


def ray_ranks(groups: Mapping[str, TrainerConfig], host: str | None) -> dict[str, RayRanks]:
    """Return ranks in Ray for each of `groups`. Nothing starts yet."""
    return {name: RayRanks(settings, host, name) for name, settings in groups.items()}


def described_ranks(groups: Mapping[str, TrainerConfig]) -> str:
    """Return the number of ranks of each group in words."""
    return ", ".join(f"{settings.ranks} {name} rank(s)" for name, settings in groups.items())


async def start_processes(
    config: ClusterConfig,
    roles: Sequence[RoleSpec],
    rendezvous: Rendezvous,
    hooks: RunHooks,
    say: Callable[[str], None],
    stack: AsyncExitStack,
    version: int = 0,
) -> tuple[WorkerDispatch, list[RolloutReplica], Coordinator]:
    """Start trainer ranks and replicas at the same time, and connect them. `stack` closes them.

    With ``trainer.colocate``, replicas start once the trainer ranks are in the host's memory, and sleep when this returns.

    `config` is fitted to the machine. The models of `roles` are on its groups of ranks; `POLICY` is published.
    The replicas begin with `version`. `hooks` are notified of every sync, and `say` prints a line for the user.
    """
    started = time.perf_counter()
    model_dir = next(role.model_dir for role in roles if role.name == POLICY)
    sizes = ", ".join(f"TP{size}" for size in config.rollout.by_size)
    say(
        f"starting {described_ranks(config.rank_groups)} ({config.trainer.engine}) and {config.rollout.replicas} rollout"
        f" replica(s) x {sizes} ({config.rollout.engine}), weights by"
        f" {config.checkpoint_engine.backend!r}" + (f", resuming at step {version}" if version else "")
    )
    ranks = ray_ranks(config.rank_groups, None if config.ray.address else config.sync.host)
    dispatch = ray_dispatch(roles, config.rank_groups, None, ranks)
    stack.push_async_callback(dispatch.close)

    async def start_rollouts(shared: Sequence[SharedDevices] = ()) -> list[RolloutReplica]:
        made = await start_replicas(config.rollout, model_dir, initial_version=version, shared=shared)
        for replica in made:
            stack.push_async_callback(replica.close)
        return made

    try:
        async with asyncio.TaskGroup() as starting:
            trainers = starting.create_task(dispatch.start())
            shared: Sequence[SharedDevices] = ()
            if config.trainer.colocate:  # replicas measure the free memory of their devices when they start
                await trainers
                shared = SharedDevices.of(await ranks[POLICY_GROUP].devices(), config.rollout)
            rollouts = starting.create_task(start_rollouts(shared))
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    replicas = rollouts.result()
    if config.trainer.colocate:
        await asyncio.gather(*(replica.sleep() for replica in replicas))
    coordinator = Coordinator(rendezvous, dispatch[POLICY].publisher_names(), replicas, config.sync, hooks=hooks)
    stack.callback(coordinator.close)
    engine, address = config.checkpoint_engine, rendezvous.address.to_plain()
    computes = dtype_of(replicas[0].dtype)
    wire = dtype_of(wire_dtype(config, replicas[0].dtype))
    if wire.itemsize > computes.itemsize:
        say(
            f"weights are sent as {dtype_name(wire)}, but the rollouts compute in {dtype_name(computes)}: every version has"
            f" {wire.itemsize / computes.itemsize:.0f} times the necessary bytes. Set sync.wire_dtype = auto to avoid that"
        )
    await asyncio.gather(
        dispatch[POLICY].connect(address, engine, config.sync, wire),
        *(replica.connect(address, engine.backend, engine.options) for replica in replicas),
    )
    say(f"all processes are connected after {time.perf_counter() - started:.1f} s")
    return dispatch, replicas, coordinator
