"""GRPO, GSPO, CISPO and other algorithms whose advantages are part of the batch: one loss trains the policy."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..data.batch import LossDenominators, MiniBatch, TokenBatch
from ..data.step_result import StepResult
from ..dispatch.dispatch import WorkerDispatch
from ..objectives.config import AlgorithmConfig
from ..objectives.policy_values import PROXIMAL_LOGPROBS
from .roles import OBJECTIVE, POLICY, REFERENCE
from .step import take_step, with_reference


class PolicyGradient:
    """The algorithm of a policy without a critic; a `Runner` calls it.

    Args:
        dispatch: Has the role `POLICY` with the loss `OBJECTIVE`; and `REFERENCE`, if that loss reads its log-probabilities.
        config: How often a batch is trained on, and what the trust region is around.
    """

    def __init__(self, dispatch: WorkerDispatch, config: AlgorithmConfig | None = None) -> None:
        self._dispatch, self._policy = dispatch, dispatch[POLICY]
        self._config = config or AlgorithmConfig()

    async def train_step(self, batch: TokenBatch, mini_batches: Sequence[MiniBatch] = ()) -> StepResult:
        """Take the optimizer steps of every trained model on one batch.

        Args:
            batch: The sequences, judged.
            mini_batches: Parts of it, of which each is a step in each epoch; none: all of it is.

        Raises:
            ProtocolError: `mini_batches` are of another batch.
        """
        batch = await self._judged(batch)
        if self._config.proximal == "trainer" and (self._config.epochs > 1 or len(mini_batches) > 1):
            outputs = await self._policy.forward(batch)
            batch = batch.with_values(PROXIMAL_LOGPROBS, [each["logprobs"] for each in outputs])
        parts = batch.split(mini_batches) * self._config.epochs
        return StepResult.of_batch([await self._update(part, denominators) for part, denominators in parts])

    async def _judged(self, batch: TokenBatch) -> TokenBatch:
        """Return the batch with what its losses read and the models say before the first step."""
        return await with_reference(batch, self._dispatch[REFERENCE]) if REFERENCE in self._dispatch else batch

    async def _update(self, batch: TokenBatch, denominators: LossDenominators) -> StepResult:
        """Take one optimizer step of every trained model."""
        return await take_step(self._policy, batch, OBJECTIVE, denominators)

    async def save(self, directory: Path) -> None:
        """Save the training state of every trained model."""
        await self._policy.save(directory)

    async def load(self, directory: Path, *, optimizer: bool = True) -> int:
        """Resume from a state that `save` wrote, or start over from a model, as `TrainingEngine.load` does.

        Returns the optimizer steps taken.
        """
        return await self._policy.load(directory, optimizer=optimizer)
