"""Parts that algorithms share: one optimizer step of a role, and a batch with the reference's log-probabilities."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from ..data.batch import LossDenominators, TokenBatch
from ..data.step_result import StepResult
from ..dispatch.role import Role
from ..objectives.loss import Loss
from ..objectives.policy_values import REFERENCE_LOGPROBS


async def take_step(
    role: Role, batch: TokenBatch, loss: str | Loss, denominators: LossDenominators | None = None
) -> StepResult:
    """Train `role` on `batch`: forward, backward and optimizer step."""
    answer, result = await asyncio.gather(role.forward_backward(batch, loss, denominators), role.optim_step())
    return replace(result, metrics=answer.metrics)


async def with_reference(batch: TokenBatch, reference: Role) -> TokenBatch:
    """Return `batch` with `REFERENCE_LOGPROBS`: the log-probabilities of its targets under the model of `reference`."""
    outputs = await reference.forward(batch)
    return batch.with_values(REFERENCE_LOGPROBS, [each["logprobs"] for each in outputs])
