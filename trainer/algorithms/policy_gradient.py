"""GRPO, GSPO, CISPO and other algorithms whose advantages are part of the batch: one loss trains the policy.

`ReferenceRefresh` makes the reference what the policy has become, every few batches.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..data.batch import LossDenominators, MiniBatch, TokenBatch
from ..data.step_result import StepResult
from ..dispatch.dispatch import WorkerDispatch
from ..dispatch.role import Role
from ..objectives.config import AlgorithmConfig
from ..objectives.policy_values import PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS, TRAINER_LOGPROBS
from .roles import OBJECTIVE, POLICY, REFERENCE
from .step import take_step


@dataclass(frozen=True, slots=True)
class ReferenceRefresh:
    """The refreshing of a reference. The weights pass through files, so that both roles may be on any ranks.

    Args:
        every: Optimizer steps of the policy from one refresh to the next.
        directory: Where the policy is exported meanwhile; on a file system that all ranks share.
    """

    every: int
    directory: Path

    def is_due(self, result: StepResult, updates: int) -> bool:
        """Whether a multiple of `every` lies among the optimizer steps of `result`, which has tried `updates` on a batch."""
        taken = 0 if result.skipped else updates - int(result.metrics.get("skipped_updates", 0))
        return result.step // self.every > (result.step - taken) // self.every

    async def refresh(self, policy: Role, reference: Role) -> None:
        """Load the policy's weights, an adapter of it added, into the reference."""
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)  # left by a run that died
        try:
            await policy.export_hf(self.directory, "float32")
            await reference.load(self.directory, optimizer=False)
        finally:
            await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)


class PolicyGradient:
    """The algorithm of a policy without a critic; a `Runner` calls it.

    Args:
        dispatch: Has the role `POLICY` with the loss `OBJECTIVE`; and `REFERENCE`, if that loss reads its log-probabilities.
        config: How often a batch is trained on, and what the trust region is around.
        refresh: Refreshes the reference; None leaves it as it is.
    """

    def __init__(
        self,
        dispatch: WorkerDispatch,
        config: AlgorithmConfig | None = None,
        refresh: ReferenceRefresh | None = None,
    ) -> None:
        self._dispatch, self._policy = dispatch, dispatch[POLICY]
        self._config = config or AlgorithmConfig()
        self._refresh = refresh if REFERENCE in dispatch else None

    async def train_step(self, batch: TokenBatch, mini_batches: Sequence[MiniBatch] = ()) -> StepResult:
        """Take the optimizer steps of every trained model on one batch.

        Args:
            batch: The sequences, judged.
            mini_batches: Parts of it, of which each is a step in each epoch; none: all of it is.

        Raises:
            ProtocolError: `mini_batches` are of another batch.
        """
        several = self._config.epochs > 1 or len(mini_batches) > 1
        own = PROXIMAL_LOGPROBS if self._config.proximal == "trainer" else TRAINER_LOGPROBS
        wanted = self._config.proximal == "trainer" or self._config.mismatch_mask != "none"
        batch = await self._judged(batch, own=own if several and wanted else None)
        parts = batch.split(mini_batches) * self._config.epochs
        result = StepResult.of_batch([await self._update(part, denominators) for part, denominators in parts])
        if self._refresh is not None and self._refresh.is_due(result, len(parts)):
            await self._refresh.refresh(self._policy, self._dispatch[REFERENCE])
        return result

    async def _judged(self, batch: TokenBatch, *, own: str | None) -> TokenBatch:
        """Return the batch with what its losses read and the models say before the first step.

        With `own`, that includes the policy's log-probabilities, under this name. All roles are asked at once.
        """
        asked = {REFERENCE_LOGPROBS: self._dispatch[REFERENCE]} if REFERENCE in self._dispatch else {}
        if own is not None:
            asked[own] = self._policy
        answers = await asyncio.gather(*(role.forward(batch) for role in asked.values()))
        for name, outputs in zip(asked, answers, strict=True):
            batch = batch.with_values(name, [each["logprobs"] for each in outputs])
        return batch

    async def _update(self, batch: TokenBatch, denominators: LossDenominators) -> StepResult:
        """Take one optimizer step of every trained model."""
        return await take_step(self._policy, batch, OBJECTIVE, denominators)

    def state_paths(self, directory: Path) -> list[Path]:
        """The directories that `save` creates."""
        return [directory, *([reference_state(directory)] if self._refresh is not None else [])]

    async def save(self, directory: Path) -> None:
        """Save the training state of every model that changes."""
        saving = [self._policy.save(directory)]
        if self._refresh is not None:
            saving.append(self._dispatch[REFERENCE].save(reference_state(directory)))
        await asyncio.gather(*saving)

    async def load(self, directory: Path, *, optimizer: bool = True) -> int:
        """Resume from a state that `save` wrote, or start over from a model, as `TrainingEngine.load` does.

        Returns the optimizer steps taken.
        """
        if self._refresh is not None and reference_state(directory).is_dir():
            await self._dispatch[REFERENCE].load(reference_state(directory), optimizer=False)
        return await self._policy.load(directory, optimizer=optimizer)


def reference_state(policy_state: Path) -> Path:
    """The directory of a refreshed reference's state, next to the policy's."""
    return policy_state.with_name(REFERENCE)
