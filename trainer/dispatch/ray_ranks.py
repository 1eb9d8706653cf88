"""`RayRanks`: a group of trainer ranks, each in a Ray actor of its own, on this machine or several."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Awaitable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from weightlane.ckpt_engines import WeightlaneError, WorkerDiedError, as_weightlane_error

from ..config import TrainerConfig
from .rank_worker import RankWorker
from .ranks import CallLimit
from .role_spec import POLICY_GROUP, rank_name

_log = logging.getLogger(__name__)
_CLOSE_S = 10.0
_DEATH_NOTICE_S = 5.0
"""Seconds to wait, after a rank's error, for the report that another rank died, which explains the error better."""


class RankActor:
    """The Ray actor of one trainer rank, with a call that lasts as long as the process."""

    def __init__(self, rank: int, world: int, group: str) -> None:
        self._rank = RankWorker(rank, world, group)
        self._closed = threading.Event()

    def call(self, method: str, *args: Any) -> Any:
        """Call one of the rank's methods."""
        return getattr(self._rank, method)(*args)

    def free_address(self, host: str | None) -> tuple[str, int]:
        """Reserve a port on `host`, or on this node's address if None: see `RankWorker.free_address`."""
        import ray  # noqa: PLC0415 - optional, and slow to import

        return self._rank.free_address(host or ray.util.get_node_ip_address())

    def device(self) -> tuple[str, str]:
        """The Ray node of this process, and the GPUs that Ray lets it see, as in ``CUDA_VISIBLE_DEVICES``."""
        import ray  # noqa: PLC0415 - as above

        return ray.get_runtime_context().get_node_id(), os.environ.get("CUDA_VISIBLE_DEVICES", "")

    def alive(self) -> None:
        """Return when the rank is closed. Until then, the pending call fails for its caller if the process dies."""
        self._closed.wait()

    def close(self) -> None:
        """Close the rank."""
        self._rank.close()
        self._closed.set()


class RayRanks:
    """A `Ranks` over Ray, which must be initialised.

    `rendezvous` requests the actors, and waits for them. Each call raises a rank's error, or
    `WorkerDiedError`, which names the rank whose process died.

    `host` is the address of rank 0 for the ranks' process group; None: the address of its Ray node. `group` is part of
    the ranks' names, which errors and time lines show.
    """

    def __init__(self, config: TrainerConfig, host: str | None, group: str = POLICY_GROUP) -> None:
        self.world, self._group = config.ranks, group
        self._limit = CallLimit(config.call_timeout_s, f"{group} ranks", "trainer.call_timeout_s")
        self._config, self._host = config, host
        self._placement: Any = None
        """Ray's placement group for the ranks; None before `rendezvous`, and if they reserve nothing."""
        self._actors: list[Any] = []
        self._started = asyncio.Event()
        self._pids: list[int] = []

    async def rendezvous(self) -> tuple[str, int]:
        """See `Ranks.rendezvous`."""
        hint = "The Ray cluster has to offer what all ranks reserve at once (`ray status` shows what it has)."
        self._actors = self._start(await self._limit.answer(self._places(), "the reservation of resources", hint))
        self._started.set()
        self._pids = await self.call("pid")
        address: tuple[str, int]
        asked = self._answers([self._actors[0].free_address.remote(self._host)])
        (address,) = await self._limit.answer(asked, "free_address")
        return address

    async def _places(self) -> list[Any]:
        """Reserve resources, and return Ray's scheduling strategy for each rank.

        Ranks that share matrices or tokens are on one node if one is large enough; neighbours are on as few nodes as possible.
        """
        import ray  # noqa: PLC0415 - optional, and slow to import
        from ray.util.placement_group import placement_group, placement_group_table  # noqa: PLC0415 - as above
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: PLC0415 - as above

        config = self._config
        each = {"CPU": config.cpus_per_rank, "GPU": config.gpus_per_rank or 0.0}
        if not any(each.values()):
            return [None] * self.world
        together = _ranks_that_share_layers(config)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        fits = any(all(node.get(name, 0.0) >= together * amount for name, amount in each.items()) for node in nodes)
        if together > 1 and not fits:
            _log.warning(
                "no node has room for %d ranks, so those that share matrices or tokens are on several nodes", together
            )
            together = 1
        bundle = {name: together * amount for name, amount in each.items() if amount}
        self._placement = placement_group([bundle] * -(-self.world // together), strategy="PACK")
        await self._placement.ready()
        node_of: dict[int, str] = placement_group_table(self._placement)["bundles_to_node_id"]
        bundles = sorted(node_of, key=lambda number: (node_of[number], number))
        return [
            PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=bundles[rank // together])
            for rank in range(self.world)
        ]

    def _start(self, places: Sequence[Any]) -> list[Any]:
        """Request an actor for each rank."""
        import ray  # noqa: PLC0415 - as above

        config = self._config
        actor_class = ray.remote(
            num_cpus=config.cpus_per_rank,
            num_gpus=config.gpus_per_rank or 0,
            max_restarts=0,
            concurrency_groups={"watch": 1, "close": 1},  # beside the call that trains
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(config.threads_per_rank)}},
        )(RankActor)
        return [
            actor_class.options(scheduling_strategy=place).remote(rank, self.world, self._group)
            for rank, place in enumerate(places)
        ]

    async def devices(self) -> list[tuple[str, str]]:
        """The Ray node and the GPUs of each rank, in rank order, once `rendezvous` has returned."""
        asked = self._answers([actor.device.remote() for actor in self._actors])
        return await self._limit.answer(asked, "device")

    def put(self, value: Any) -> Any:
        """See `Ranks.put`. The value goes to Ray's object store, or for a single rank into each call, which is faster."""
        import ray  # noqa: PLC0415 - as above

        return ray.put(value) if self.world > 1 else value

    def call(self, method: str, *args: Any) -> Awaitable[list[Any]]:
        """See `Ranks.call`."""
        return self._limit.answer(self._answers([actor.call.remote(method, *args) for actor in self._actors]), method)

    async def watch(self) -> NoReturn:
        """See `Ranks.watch`."""
        await self._started.wait()
        await self._answers([actor.alive.options(concurrency_group="watch").remote() for actor in self._actors])
        await asyncio.Event().wait()  # the ranks were closed on purpose
        raise AssertionError

    async def close(self) -> None:
        """See `Ranks.close`."""
        import ray  # noqa: PLC0415 - as above

        with suppress(WeightlaneError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._answers([actor.close.options(concurrency_group="close").remote() for actor in self._actors])
        for actor in self._actors:
            with suppress(Exception):  # Ray was shut down before, and the actor with it.
                ray.kill(actor, no_restart=True)
        if self._placement is not None:
            with suppress(Exception):  # as above
                ray.util.remove_placement_group(self._placement)

    async def _answers(self, calls: Sequence[Any]) -> list[Any]:
        tasks = [asyncio.ensure_future(self._one(call, rank)) for rank, call in enumerate(calls)]
        if not tasks:
            return []
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            errors = [task.exception() for task in tasks if task.done() and task.exception()]
            if errors and not any(isinstance(error, WorkerDiedError) for error in errors):
                # A dead rank makes the others fail too, and their errors may arrive first.
                await asyncio.wait(tasks, timeout=_DEATH_NOTICE_S)
                errors = [task.exception() for task in tasks if task.done() and task.exception()]
            if errors:
                died = [error for error in errors if isinstance(error, WorkerDiedError)]
                raise (died or errors)[0] or AssertionError
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()

    async def _one(self, call: Any, rank: int) -> Any:
        from ray.exceptions import RayActorError, RayTaskError  # noqa: PLC0415 - as above

        try:
            return await call
        except RayActorError as cause:
            process = f" (process {self._pids[rank]})" if rank < len(self._pids) else ""
            raise WorkerDiedError(
                f"{self._group} rank {rank}{process} died.",
                part=f"{self._group} ranks",
                peer=rank_name(self._group, rank),
                hint="See its log for the cause. Then start again to go on from the last saved state (a run with --resume).",
            ) from cause
        except RayTaskError as cause:
            raise as_weightlane_error(cause.cause, f"{self._group} rank {rank}") from cause


def _ranks_that_share_layers(config: TrainerConfig) -> int:
    """Number of neighbouring ranks that exchange activations in every layer; 1 for an engine that weightlane does not know."""
    layout = getattr(config, config.engine, None)
    return int(getattr(layout, "tensor_parallel", 1)) * int(getattr(layout, "context_parallel", 1))
