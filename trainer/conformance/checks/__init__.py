"""The checks of the suite, grouped by part of the contract, and `TrainingEngineConformance`, which has them all."""

from __future__ import annotations

from .ends import EndChecks
from .gradients import GradientChecks
from .outputs import OutputChecks
from .shards import ShardChecks
from .states import StateChecks
from .steps import StepChecks


class TrainingEngineConformance(
    OutputChecks,
    GradientChecks,
    StepChecks,
    ShardChecks,
    StateChecks,
    EndChecks,
):
    """The suite. Derive a test class and set `engine`, and `layouts` and `models` if the engine takes others."""
