"""The built-in observers, and the environment variables that request them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .prometheus import PROMETHEUS_ENV, prometheus_from_environment
from .tensorboard import TENSORBOARD_ENV, tensorboard_from_environment
from .trace.observer import TRACE_ENV, trace_from_environment
from .trackers import MLFLOW_ENV, TRACKIO_ENV, WANDB_ENV, tracker_from_environment


@dataclass(frozen=True, slots=True)
class BuiltinObserver:
    """A built-in observer."""

    name: str
    variable: str
    """Name of the environment variable that requests the observer. Its value is a path, an address or a project."""
    make: Callable[[str], object]
    """Makes the observer from that value."""


OBSERVERS = (
    BuiltinObserver("trace", TRACE_ENV, trace_from_environment),
    BuiltinObserver("tensorboard", TENSORBOARD_ENV, tensorboard_from_environment),
    BuiltinObserver("prometheus", PROMETHEUS_ENV, prometheus_from_environment),
    BuiltinObserver("wandb", WANDB_ENV, tracker_from_environment("wandb")),
    BuiltinObserver("mlflow", MLFLOW_ENV, tracker_from_environment("mlflow")),
    BuiltinObserver("trackio", TRACKIO_ENV, tracker_from_environment("trackio")),
)
"""Every built-in observer. Each is active only if its variable is set."""
