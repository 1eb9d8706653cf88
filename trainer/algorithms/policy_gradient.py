"""GRPO, GSPO, CISPO and others whose advantages come with the batch: one role is trained, by one loss."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import NoReturn

from ..data.batch import MiniBatch, TokenBatch
from ..dispatch.dispatch import WorkerDispatch
from ..loop.protocols import StepReport
from .roles import OBJECTIVE, POLICY


class PolicyGradient:
    """`weightlane.trainer.loop.protocols.Trainers` for a policy alone.

    Args:
        dispatch: Has the role `POLICY`, with the loss `OBJECTIVE`.
    """

    def __init__(self, dispatch: WorkerDispatch) -> None:
        self._dispatch, self._policy = dispatch, dispatch[POLICY]

    async def train_step(self, batch: TokenBatch, mini_batch: MiniBatch | None = None) -> StepReport:
        """See `Trainers.train_step`."""
        answer, result = await asyncio.gather(
            self._policy.forward_backward(batch, OBJECTIVE, mini_batch), self._policy.optim_step()
        )
        return StepReport(result.step, answer.metrics, result.grad_norm, result.fence_s, result.seconds, result.skipped)

    async def publish(self, version: int) -> float:
        """See `Trainers.publish`."""
        return await self._policy.publish(version)

    async def save(self, directory: Path) -> None:
        """See `Trainers.save`."""
        await self._policy.save(directory)

    async def watch(self) -> NoReturn:
        """See `Trainers.watch`."""
        await self._dispatch.watch()
