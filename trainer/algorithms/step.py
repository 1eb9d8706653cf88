"""Steps of one role that algorithms share, plain or by DPO."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ..data.batch import LossDenominators, TokenBatch
from ..data.step_result import StepResult
from ..dispatch.dispatch import WorkerDispatch
from ..dispatch.role import Role
from ..objectives.loss import Loss
from ..objectives.policy_values import REFERENCE_LOGPROBS
from .roles import OBJECTIVE, POLICY, REFERENCE


async def take_step(
    role: Role, batch: TokenBatch, loss: str | Loss, denominators: LossDenominators | None = None
) -> StepResult:
    """Train `role` on `batch`: forward, backward and optimizer step."""
    answer, result = await asyncio.gather(role.forward_backward(batch, loss, denominators), role.optim_step())
    return replace(result, metrics=answer.metrics)


async def dpo_step(dispatch: WorkerDispatch, pairs: TokenBatch) -> StepResult:
    """Take one step of direct preference optimization; see `weightlane.trainer.dpo`.

    Args:
        dispatch: Has the roles `POLICY`, whose loss `OBJECTIVE` is a `dpo`, and `REFERENCE`.
        pairs: ``TokenBatch(sequences, sequences_per_unit=2)``, each chosen sequence before the rejected one.
    """
    outputs = await dispatch[REFERENCE].forward(pairs)
    judged = pairs.with_values(REFERENCE_LOGPROBS, [each["logprobs"] for each in outputs])
    return await take_step(dispatch[POLICY], judged, OBJECTIVE)
