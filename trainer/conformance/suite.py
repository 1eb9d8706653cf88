"""`TrainingEngineConformance` combines every check of the suite in one class."""

from __future__ import annotations

from .checks.ends import EndChecks
from .checks.gradients import GradientChecks
from .checks.outputs import OutputChecks
from .checks.shards import ShardChecks
from .checks.states import StateChecks
from .checks.steps import StepChecks


class TrainingEngineConformance(
    OutputChecks,
    GradientChecks,
    StepChecks,
    ShardChecks,
    StateChecks,
    EndChecks,
):
    """The suite. Derive a test class and set `engine`, and `layouts` and `models` if the engine takes others."""
