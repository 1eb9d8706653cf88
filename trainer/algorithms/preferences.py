"""DPO: a policy learns which of two completions is preferred."""

from __future__ import annotations

from ..data.batch import LossDenominators, TokenBatch
from ..data.step_result import StepResult
from ..dispatch.dispatch import WorkerDispatch
from .roles import OBJECTIVE, POLICY, REFERENCE
from .step import take_step, with_reference


async def dpo_step(
    dispatch: WorkerDispatch, pairs: TokenBatch, denominators: LossDenominators | None = None
) -> StepResult:
    """Take one step of direct preference optimization; see `weightlane.trainer.dpo`.

    Args:
        dispatch: Has the roles `POLICY`, whose loss `OBJECTIVE` is a `dpo`, and `REFERENCE`.
        pairs: ``TokenBatch(sequences, sequences_per_unit=2)``, each chosen sequence before the rejected one.
        denominators: See `Role.forward_backward`.
    """
    judged = await with_reference(pairs, dispatch[REFERENCE])
    return await take_step(dispatch[POLICY], judged, OBJECTIVE, denominators)
