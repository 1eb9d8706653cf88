"""The built-in observers, by name, and the environment variables that ask for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .prometheus import PROMETHEUS_ENV, prometheus_from_environment
from .tensorboard import TENSORBOARD_ENV, tensorboard_from_environment
from .trace.observer import TRACE_ENV, trace_from_environment


@dataclass(frozen=True, slots=True)
class BuiltinObserver:
    """One built-in observer."""

    name: str
    variable: str
    """The environment variable that asks for it; its value says where to."""
    make: Callable[[str], object]
    """Makes it from that value."""


OBSERVERS = (
    BuiltinObserver("trace", TRACE_ENV, trace_from_environment),
    BuiltinObserver("tensorboard", TENSORBOARD_ENV, tensorboard_from_environment),
    BuiltinObserver("prometheus", PROMETHEUS_ENV, prometheus_from_environment),
)
"""Every built-in observer. None is active that nobody asked for."""
