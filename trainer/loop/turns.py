"""`Turns`: trainers and rollouts that share devices, and use them one after the other.

    generation: weights and caches of the rollouts      (the trainers' state is in the host's memory)
    training:   parameters, gradients, optimizer state  (the rollouts sleep)
    sync:       parameters of the trainers, weights of the rollouts

Caches and a trainer's gradients or optimizer state are never on a device together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Literal, NoReturn

from weightlane.ckpt_engines import ProtocolError, WeightlaneError
from weightlane.plugins import RunHooks
from weightlane.sync import ReplicaState, SyncReport

from ..data.batch import MiniBatch, TokenBatch
from ..data.step_result import StepResult
from .protocols import Rollout, SharedTrainers, Syncer

Turn = Literal["generation", "training", "sync"]


class Turns:
    """The trainers and the syncer of a loop whose rollouts sleep while the trainers compute.

    A step begins once every rollout sleeps; a rollout sleeps once its requests have ended. A sync wakes the weights of the
    rollouts. At its end the state of the trainers is moved to the host, and then the caches wake. While a rollout has no caches,
    its state is `ReplicaState.JOINING`, so that it gets no requests. The hook ``turn_ended`` reports the memory of every process.

    All `rollouts` sleep at first, and none joins later.
    """

    def __init__(self, trainers: SharedTrainers, syncer: Syncer, rollouts: Sequence[Rollout], hooks: RunHooks) -> None:
        self._trainers, self._syncer, self._hooks = trainers, syncer, hooks
        self._rollouts = rollouts
        self._resting = {rollout.name for rollout in rollouts}
        """The rollouts that get no requests."""
        self._training = False
        """Whether gradients and optimizer state may be on the device."""

    async def train_step(self, batch: TokenBatch, mini_batches: Sequence[MiniBatch]) -> StepResult:
        """See `Trainers.train_step`. Waits until every rollout sleeps."""
        self._resting = {rollout.name for rollout in self._rollouts}
        await _all([rollout.sleep() for rollout in self._rollouts])
        for rollout in self._rollouts:
            self._syncer.weights_lost(rollout.name)
        await self._ended("generation")
        self._training = True
        return await self._trainers.train_step(batch, mini_batches)

    async def publish(self, version: int) -> float:
        """See `Trainers.publish`, which moves everything but the parameters to the host's memory."""
        seconds = await self._trainers.publish(version)
        await self._end_training()
        return seconds

    async def watch(self) -> NoReturn:
        """See `Trainers.watch`."""
        await self._trainers.watch()

    async def sync(self, version: int) -> SyncReport:
        """See `Syncer.sync`. The rollouts' weights wake before it, and their caches after it."""
        if self._training:  # after a step that changed nothing, the version before is sent again out of its snapshot
            await self._trainers.offload()
            await self._end_training()
        await _all([rollout.wake("weights") for rollout in self._rollouts])
        report = await self._syncer.sync(version)
        await self._trainers.offload()
        await self._ended("sync")
        await _all([rollout.wake("caches") for rollout in self._rollouts])
        self._resting = set()
        return report

    def states(self) -> Mapping[str, ReplicaState]:
        """See `Syncer.states`."""
        return {
            name: ReplicaState.JOINING if name in self._resting and state is ReplicaState.SERVING else state
            for name, state in self._syncer.states().items()
        }

    def weights_lost(self, name: str) -> None:
        """See `Syncer.weights_lost`."""
        self._syncer.weights_lost(name)

    def participant_lost(self, error: WeightlaneError, replica: str = "") -> None:
        """See `Syncer.participant_lost`."""
        self._syncer.participant_lost(error, replica)

    def add(self, replica: Rollout) -> None:
        """Refuse: a replica that starts would take the device out of turn."""
        raise ProtocolError(f"{replica.name} cannot join a run in which devices are shared.", part="turns")

    def remove(self, name: str) -> None:
        """See `Syncer.remove`."""
        self._syncer.remove(name)

    async def _end_training(self) -> None:
        if self._training:
            self._training = False
            await self._ended("training")

    async def _ended(self, turn: Turn) -> None:
        """Report the memory of every process in the `turn` that has ended, once it has freed what only that turn needs."""
        trainers, *rollouts = await _all(
            [self._trainers.memory_use(), *(rollout.memory_use() for rollout in self._rollouts)]
        )
        use = dict(trainers)
        for rollout, ranks in zip(self._rollouts, rollouts, strict=True):
            use |= {f"{rollout.name}/{rank}": each for rank, each in enumerate(ranks)}
        facts = {
            "held_bytes": {name: held for name, (held, _) in use.items()},
            "peak_bytes": {name: peak for name, (_, peak) in use.items()},
        }
        self._hooks.turn_ended(turn=turn, facts=facts)


async def _all(calls: Sequence[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Make all `calls` at once, wait for all, and raise the first error."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results
