"""`TrainerGroup`: all trainer ranks, each in a Ray actor of its own, on this machine or several."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch

from weightlane.ckpt_engines import DeadlineExceededError, WeightlaneError, WorkerDiedError, as_weightlane_error
from weightlane.sync import CheckpointEngineConfig, SyncConfig
from weightlane.sync.publisher import publisher_name
from weightlane.sync.version.placement import Placement

from ..config import TrainerConfig
from ..data.batch import MiniBatch, TokenBatch
from ..loop.protocols import StepReport
from ..objectives.loss import Loss
from .trainer_rank import TrainerRank

_CLOSE_S = 10.0
_DEATH_NOTICE_S = 5.0
"""Seconds that a rank's error waits for the news that another rank died, which explains the error better."""


class _RankActor:
    """The Ray actor of one trainer rank, with a call that lasts as long as the process."""

    def __init__(self, config: TrainerConfig, loss: Loss, rank: int, world: int) -> None:
        self._rank = TrainerRank(config, loss, rank, world)
        self._closed = threading.Event()

    def call(self, method: str, *args: Any) -> Any:
        """Call one of the rank's methods."""
        return getattr(self._rank, method)(*args)

    def free_address(self, host: str | None) -> tuple[str, int]:
        """A port that is free now on `host`, or on this node's address."""
        import ray  # noqa: PLC0415 - optional, and slow to import

        return self._rank.free_address(host or ray.util.get_node_ip_address())

    def alive(self) -> None:
        """Return when the rank is closed; until then the pending call tells its caller when the process dies."""
        self._closed.wait()

    def close(self) -> None:
        """Close the rank."""
        self._rank.close()
        self._closed.set()


class TrainerGroup:
    """The loop's handle of all trainer ranks: `weightlane.trainer.loop.protocols.Trainers` over Ray.

    Calls reach every rank in the order in which they were made. Each raises what the rank raised, or `WorkerDiedError` naming
    the rank whose process is gone.
    """

    def __init__(self, config: TrainerConfig, actors: Sequence[Any]) -> None:
        self._config = config
        self._actors = list(actors)
        self._pids: list[int] = []

    @classmethod
    def place(cls, config: TrainerConfig, loss: Loss) -> TrainerGroup:
        """Ask Ray, which must be initialized, for one actor per rank; `start` waits for them."""
        import ray  # noqa: PLC0415 - optional, and slow to import

        actor_class = ray.remote(
            num_cpus=config.cpus_per_rank,
            num_gpus=config.gpus_per_rank or 0,
            max_restarts=0,
            concurrency_groups={"watch": 1, "close": 1},
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(config.threads_per_rank)}},
        )(_with_concurrency_groups(_RankActor))
        return cls(config, [actor_class.remote(config, loss, rank, config.ranks) for rank in range(config.ranks)])

    def publisher_names(self) -> list[str]:
        """The names under which the ranks publish, in rank order."""
        return [publisher_name(rank) for rank in range(len(self._actors))]

    async def start(self, model_dir: Path, seed: int, host: str | None, state: Path | None = None) -> int:
        """Load the model (and `state`) on every rank; returns the optimizer steps taken so far.

        `host` is rank 0's address, on which the ranks meet; None takes that of its Ray node.
        """
        self._pids = await self._all("pid")
        rendezvous = (await self._await([self._actors[0].free_address.remote(host)], "free_address"))[0]
        steps: list[int] = await self._all("setup", rendezvous, model_dir, seed, state)
        return steps[0]

    async def connect(
        self,
        rendezvous: Mapping[str, Any],
        transport: CheckpointEngineConfig,
        sync: SyncConfig,
        wire_dtype: torch.dtype,
    ) -> None:
        """Make every rank's publisher."""
        dtype = str(wire_dtype).removeprefix("torch.")
        placements: list[Placement] = await self._all("placement", dtype)
        await self._all("connect", dict(rendezvous), transport, sync, dtype, placements)

    async def train_step(self, batch: TokenBatch, mini_batch: MiniBatch | None = None) -> StepReport:
        """One optimizer step on every rank."""
        import ray  # noqa: PLC0415 - as above

        reports: list[StepReport] = await self._all("train_step", ray.put(batch), mini_batch)
        return StepReport(
            reports[0].step,
            reports[0].metrics,
            reports[0].grad_norm,
            max(report.fence_s for report in reports),
            max(report.seconds for report in reports),
            reports[0].skipped,
        )

    async def publish(self, version: int) -> float:
        """Publish on every rank; returns the longest time a rank was blocked."""
        seconds: list[float] = await self._all("publish", version)
        return max(seconds)

    async def save(self, directory: Path) -> None:
        """Save the full training state."""
        await self._all("save", directory)

    async def export_hf(self, directory: Path, dtype: str) -> None:
        """Write a Hugging Face model directory with weights in `dtype`."""
        await self._all("export_hf", directory, dtype)

    async def watch(self) -> NoReturn:
        """Raise `WorkerDiedError` when a rank's process dies."""
        await self._await([actor.alive.remote() for actor in self._actors], "alive")
        await asyncio.Event().wait()  # the ranks were closed on purpose
        raise AssertionError

    async def close(self) -> None:
        """End every rank; never raises."""
        import ray  # noqa: PLC0415 - as above

        with suppress(WeightlaneError, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await self._await([actor.close.remote() for actor in self._actors], "close")
        for actor in self._actors:
            with suppress(Exception):  # Ray was shut down before, and the actor with it.
                ray.kill(actor, no_restart=True)

    def _all(self, method: str, *args: Any) -> Any:
        """Call `method` on every rank now, and return an awaitable of the answers."""
        return self._await([actor.call.remote(method, *args) for actor in self._actors], method)

    async def _await(self, calls: Sequence[Any], what: str) -> list[Any]:
        try:
            async with asyncio.timeout(self._config.call_timeout_s if what != "alive" else None):
                return await self._answers(calls)
        except TimeoutError as error:
            if isinstance(error, WeightlaneError):
                raise
            raise DeadlineExceededError(
                f"{what} was not answered within {self._config.call_timeout_s:.0f} s.",
                part="trainer group",
                hint="Raise trainer.call_timeout_s, or look for a rank that hangs.",
            ) from None

    async def _answers(self, calls: Sequence[Any]) -> list[Any]:
        tasks = [asyncio.ensure_future(self._one(call, rank)) for rank, call in enumerate(calls)]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            errors = [task.exception() for task in tasks if task.done() and task.exception()]
            if errors and not any(isinstance(error, WorkerDiedError) for error in errors):
                # A rank that died makes the others fail too, and they may be faster to say so.
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
                f"trainer rank {rank}{process} died.",
                part="trainer group",
                peer=publisher_name(rank),
                hint="Its log has the cause; --resume goes on from the last saved step.",
            ) from cause
        except RayTaskError as cause:
            raise as_weightlane_error(cause.cause, f"trainer rank {rank}") from cause


def _with_concurrency_groups(actor_class: type[_RankActor]) -> type[_RankActor]:
    """Let `alive` and `close` run beside the one call that trains."""
    import ray  # noqa: PLC0415 - as above

    class RankActor(actor_class):  # type: ignore[misc, valid-type]
        alive = ray.method(concurrency_group="watch")(actor_class.alive)
        close = ray.method(concurrency_group="close")(actor_class.close)

    return RankActor
