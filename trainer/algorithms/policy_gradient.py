"""GRPO, GSPO, CISPO and other algorithms whose advantages are part of the batch: one loss trains the policy."""

from __future__ import annotations

from pathlib import Path

from ..data.batch import LossDenominators, TokenBatch
from ..data.step_result import StepResult
from ..dispatch.dispatch import WorkerDispatch
from .roles import OBJECTIVE, POLICY, REFERENCE
from .step import take_step, with_reference


class PolicyGradient:
    """The algorithm of a policy without a critic; a `Runner` calls it.

    Args:
        dispatch: Has the role `POLICY` with the loss `OBJECTIVE`; and `REFERENCE`, if that loss reads its log-probabilities.
    """

    def __init__(self, dispatch: WorkerDispatch) -> None:
        self._dispatch, self._policy = dispatch, dispatch[POLICY]

    async def train_step(self, batch: TokenBatch, denominators: LossDenominators | None = None) -> StepResult:
        """Take one optimizer step of every trained model. See `Role.forward_backward` for the arguments."""
        if REFERENCE in self._dispatch:
            batch = await with_reference(batch, self._dispatch[REFERENCE])
        return await take_step(self._policy, batch, OBJECTIVE, denominators)

    async def save(self, directory: Path) -> None:
        """Save the training state of every trained model."""
        await self._policy.save(directory)

    async def load(self, directory: Path, *, optimizer: bool = True) -> int:
        """Resume from a state that `save` wrote, or start over from a model, as `TrainingEngine.load` does.

        Returns the optimizer steps taken.
        """
        return await self._policy.load(directory, optimizer=optimizer)
