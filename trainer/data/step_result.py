"""`StepResult`: the result of one optimizer step, for every caller from the rank to the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step; times are those of the slowest rank."""

    step: int
    """Optimizer steps taken so far; in a run, also the trainer's weight version."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the loss, if the step includes its passes (`take_step`); empty for a step by itself."""
    grad_norm: float = 0.0
    fence_s: float = 0.0
    """Seconds in which the optimizer waited for the snapshot of the version published before."""
    seconds: float = 0.0
    """Seconds of the forward and backward passes since the previous step, and of this step."""
    skipped: str = ""
    """Reason why no parameter was changed and `step` is unchanged; empty when all went well."""

    @classmethod
    def slowest(cls, results: Sequence[StepResult]) -> StepResult:
        """Combine the results of a step's ranks, with the longest times."""
        first = results[0]
        fence_s, seconds = max(each.fence_s for each in results), max(each.seconds for each in results)
        return cls(first.step, first.metrics, first.grad_norm, fence_s, seconds, first.skipped)
