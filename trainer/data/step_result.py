"""`StepResult`: the result of one optimizer step, or of all those on one batch, for every caller from the rank to the loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

_COMPUTED_TOKENS = ("read_tokens", "packed_tokens")
"""Metrics of engines that can share prefixes: tokens of all sequences, and those that the model computed."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step; times are those of the slowest rank."""

    step: int
    """Optimizer steps taken so far."""
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
    def of_batch(cls, updates: Sequence[StepResult]) -> StepResult:
        """Combine the optimizer steps taken on one batch: metrics are means over those that changed parameters.

        Numbers of tokens are summed. If some steps were skipped, ``skipped_updates`` counts them; the result is skipped if all
        were.
        """
        if len(updates) == 1:
            return updates[0]
        taken = [each for each in updates if not each.skipped]
        kept = taken or updates
        names = dict.fromkeys(name for each in kept for name in each.metrics)
        metrics = {name: _mean([each.metrics[name] for each in kept if name in each.metrics]) for name in names}
        for name in ("tokens", *(name for name in _COMPUTED_TOKENS if name in metrics)):
            metrics[name] = sum(each.metrics.get(name, 0.0) for each in kept)
        if skipped := len(updates) - len(taken):
            metrics["skipped_updates"] = float(skipped)
        fence_s, seconds = sum(each.fence_s for each in updates), sum(each.seconds for each in updates)
        grad_norm, reason = _mean([each.grad_norm for each in kept]), "" if taken else updates[-1].skipped
        return cls(updates[-1].step, metrics, grad_norm, fence_s, seconds, reason)

    @classmethod
    def slowest(cls, results: Sequence[StepResult]) -> StepResult:
        """Combine the results of a step's ranks, with the longest times."""
        first = results[0]
        fence_s, seconds = max(each.fence_s for each in results), max(each.seconds for each in results)
        return cls(first.step, first.metrics, first.grad_norm, fence_s, seconds, first.skipped)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
