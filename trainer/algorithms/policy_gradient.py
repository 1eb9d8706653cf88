"""GRPO, GSPO, CISPO and others whose advantages come with the batch: a policy is trained by one loss."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from ..data.batch import LossDenominators, TokenBatch
from ..dispatch.dispatch import WorkerDispatch
from ..loop.protocols import StepReport
from .roles import OBJECTIVE, POLICY, REFERENCE
from .step import take_step, with_reference


class PolicyGradient:
    """`weightlane.trainer.loop.protocols.Trainers` for a policy without a critic.

    Args:
        dispatch: Has the role `POLICY` with the loss `OBJECTIVE`; and `REFERENCE`, if that loss reads its log-probabilities.
    """

    def __init__(self, dispatch: WorkerDispatch) -> None:
        self._dispatch, self._policy = dispatch, dispatch[POLICY]

    async def train_step(self, batch: TokenBatch, denominators: LossDenominators | None = None) -> StepReport:
        """See `Trainers.train_step`."""
        if REFERENCE in self._dispatch:
            batch = await with_reference(batch, self._dispatch[REFERENCE])
        return await take_step(self._policy, batch, OBJECTIVE, denominators)

    async def publish(self, version: int) -> float:
        """See `Trainers.publish`."""
        return await self._policy.publish(version)

    async def save(self, directory: Path) -> None:
        """See `Trainers.save`."""
        await self._policy.save(directory)

    async def load(self, directory: Path, *, optimizer: bool = True) -> int:
        """Resume from a state that `save` wrote, or begin anew, as `TrainingEngine.load` does; the optimizer steps taken."""
        return await self._policy.load(directory, optimizer=optimizer)

    async def watch(self) -> NoReturn:
        """See `Trainers.watch`."""
        await self._dispatch.watch()
