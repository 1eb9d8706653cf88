"""The room for replicas in a Ray cluster: what a number of them needs, and a fleet that follows the machines."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError
from weightlane.ckpt_engines.runtime.threads import DaemonThreads
from weightlane.rollout.config import RolloutConfig
from weightlane.trainer.loop.fleet import Fleet, FleetState

from ..config.run_config import ClusterConfig
from ..run.ray_cluster import ClusterRoom
from ..run.resources import Machines, check_gpus, reserved_cpus

_POLL_S = 5.0
_ANSWER_S = 30.0
"""Longest time of one look at the cluster, which may be busy with the death of a machine."""
_PAUSE_S = 60.0
"""Seconds between a replica that could not start and the next one on the same machines; doubled each time."""
_LONGEST_PAUSE_S = 1800.0
_Answer = TypeVar("_Answer")


async def ask_ray(threads: DaemonThreads, question: Callable[[], _Answer]) -> _Answer:
    """Return what `question` returns, which may block: it is asked in one of `threads`, which no end of a run waits for.

    Raises `DeadlineExceededError` if Ray does not answer.
    """
    try:
        return await asyncio.wait_for(asyncio.wrap_future(threads.submit(question)), _ANSWER_S)
    except TimeoutError:
        raise DeadlineExceededError(
            f"the Ray cluster did not say within {_ANSWER_S:.0f} s what it has.",
            part="fleet",
            hint="See whether its head node lives: ray status.",
        ) from None


def check_replicas(config: ClusterConfig, wanted: int, machines: Machines, cpus: float) -> None:
    """Raise `ConfigError` if a run cannot have `wanted` replicas: for its settings, or for the GPUs and CPUs of its cluster."""
    rollout = config.rollout
    if rollout.autoscale:
        raise ConfigError(
            "the number of replicas follows the machines of the cluster (rollout.autoscale).",
            part="fleet",
            hint="Add machines to the cluster, or remove some; rollout.max_replicas bounds the number.",
        )
    if not rollout.min_replicas <= wanted <= (rollout.max_replicas or wanted):
        raise ConfigError(
            f"{wanted} replicas are not within the run's limits: rollout.min_replicas is {rollout.min_replicas}"
            + (f", and rollout.max_replicas is {rollout.max_replicas}." if rollout.max_replicas else "."),
            part="fleet",
        )
    # Others than those that the run begins with have the size tensor_parallel.
    sizes = [each.tensor_parallel for each in rollout.each]
    sizes = [*sizes, *[rollout.tensor_parallel] * (wanted - len(sizes))][:wanted]
    update = {"replicas": wanted, "sizes": tuple(sizes), "max_replicas": None}
    scaled = config.model_copy(update={"rollout": rollout.model_copy(update=update)})
    check_gpus(scaled, machines)  # which Ray would wait for
    if (needed := reserved_cpus(scaled)) > cpus:
        raise ConfigError(
            f"{wanted} replicas and the trainer reserve {needed:g} CPUs, but Ray has {cpus:g}.",
            part="fleet",
            hint="A Ray that the run starts has as many as the machine, and as rollout.max_replicas need. With ray.address, add"
            " machines to the cluster. rollout.cpus_per_rank says how many a rank reserves.",
        )


class RoomFollower:
    """Scales a fleet to the room for its replicas, with ``rollout.autoscale``. `look` tells the room."""

    def __init__(self, fleet: Fleet, rollout: RolloutConfig, look: Callable[[], Awaitable[ClusterRoom]]) -> None:
        self._fleet, self._rollout, self._look = fleet, rollout, look
        self._known: frozenset[str] = frozenset()
        self._failures, self._noted, self._not_before = 0, False, 0.0

    @asynccontextmanager
    async def following(self, say: Callable[[str], None]) -> AsyncIterator[None]:
        """Follow the room inside the block. `say` prints a line if that ends before, because the cluster does not answer."""

        async def follow() -> None:
            try:
                await self._follow()
            except Exception as error:  # noqa: BLE001 - the run goes on with the replicas that it has
                say(f"the number of replicas does not follow the machines any more: {error}")

        task = asyncio.create_task(follow(), name="room-follower")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _follow(self) -> None:
        """Follow the room until cancelled, or until `look` raises."""
        while True:
            self.scale(await self._look(), asyncio.get_running_loop().time())
            await asyncio.sleep(_POLL_S)

    def scale(self, room: ClusterRoom, now: float) -> None:
        """Scale the fleet to `room`. `now` is a time in seconds."""
        state = self._fleet.state()
        if state.failed and not self._noted:
            self._noted = True
            self._not_before = now + min(_LONGEST_PAUSE_S, _PAUSE_S * 2**self._failures)
            self._failures += 1
        elif not state.failed and not state.starting:
            self._failures = 0
        if room.machines.keys() - self._known:  # where a start may succeed
            self._not_before = now
        self._known = frozenset(room.machines)
        if now >= self._not_before and (wanted := self._wanted(room, state)) > state.wanted:
            self._noted = False
            self._fleet.scale(wanted)

    def _wanted(self, room: ClusterRoom, state: FleetState) -> int:
        # Some of those that start have reserved their share, and others not yet. They are counted as if none had.
        further = max(0, room.further(self._rollout) - len(state.starting))
        most = self._rollout.max_replicas or math.inf
        return int(min(most, state.wanted + further))
