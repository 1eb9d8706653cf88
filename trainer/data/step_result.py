"""`StepResult`: what one optimizer step gave, for every caller from the rank to the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step; where ranks differ, the figures of the slowest one."""

    step: int
    """Optimizer steps taken so far; in a run, also the trainer's weight version."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the loss, where the step came with its passes (`take_step`); empty for a step by itself."""
    grad_norm: float = 0.0
    fence_s: float = 0.0
    """Seconds in which the optimizer waited for the snapshot of the version published before."""
    seconds: float = 0.0
    """Seconds of forward and backward passes since the step before, and of this one."""
    skipped: str = ""
    """Reason why no parameter was changed and `step` is unchanged; empty when all went well."""

    @classmethod
    def slowest(cls, results: Sequence[StepResult]) -> StepResult:
        """The result of a step from those of its ranks."""
        first = results[0]
        fence_s, seconds = max(each.fence_s for each in results), max(each.seconds for each in results)
        return cls(first.step, first.metrics, first.grad_norm, fence_s, seconds, first.skipped)
