"""Loads the observers that installed distributions register and that environment variables request."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint

from .entry_points import entry_points_of
from .hooks import RunHooks
from .profiler import PROFILE_ENV, profiler_from_environment
from .prometheus import PROMETHEUS_ENV, prometheus_from_environment
from .tensorboard import TENSORBOARD_ENV, tensorboard_from_environment
from .trace.observer import TRACE_ENV, trace_from_environment
from .trackers import MLFLOW_ENV, TRACKIO_ENV, WANDB_ENV, tracker_from_environment

ENTRY_POINT_GROUP = "weightlane.plugins"
"""Entry-point group of observers. An entry is a module, an object, or a class, which is instantiated without arguments."""


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
    BuiltinObserver("profiler", PROFILE_ENV, profiler_from_environment),
    BuiltinObserver("tensorboard", TENSORBOARD_ENV, tensorboard_from_environment),
    BuiltinObserver("prometheus", PROMETHEUS_ENV, prometheus_from_environment),
    BuiltinObserver("wandb", WANDB_ENV, tracker_from_environment("wandb")),
    BuiltinObserver("mlflow", MLFLOW_ENV, tracker_from_environment("mlflow")),
    BuiltinObserver("trackio", TRACKIO_ENV, tracker_from_environment("trackio")),
)
"""Every built-in observer. Each is active only if its variable is set."""


def make_hooks(observers: Iterable[object] = ()) -> RunHooks:
    """Return hooks that call `observers` and those that distributions register under ``weightlane.plugins``.

    A plugin that cannot be loaded is reported and skipped: see `RunHooks.reports`.
    """
    hooks = RunHooks()
    for entry_point in _installed():
        name = _described(entry_point)
        try:
            loaded = entry_point.load()
            observer = loaded() if isinstance(loaded, type) else loaded
        except Exception as error:  # noqa: BLE001 - third-party code
            hooks.report(name, "", error)
        else:
            hooks.register(observer, name)
    for observer in observers:
        hooks.register(observer)
    return hooks


def process_hooks() -> RunHooks:
    """Return the hooks of this process, for parts of weightlane that were given none of their own.

    They call installed plugins, and the `OBSERVERS` whose environment variables are set. The first call makes them.
    """
    global _process  # noqa: PLW0603 - each process has one
    with _making:
        if _process is None:
            _process = _from_environment()
        return _process


_making = threading.Lock()
_process: RunHooks | None = None


def _start_over() -> None:
    """Give a forked child hooks of its own, and a lock that no thread of its parent holds."""
    global _making, _process
    _making, _process = threading.Lock(), None


os.register_at_fork(after_in_child=_start_over)


def _from_environment() -> RunHooks:
    hooks = make_hooks()
    for builtin in OBSERVERS:
        if value := os.environ.get(builtin.variable):
            try:
                observer = builtin.make(value)
            except Exception as error:  # noqa: BLE001 - for example a missing library or a port in use
                hooks.report(f"{builtin.name} (requested by {builtin.variable})", "", error)
            else:
                hooks.register(observer, builtin.name)
    return hooks


def _installed() -> list[EntryPoint]:
    return sorted(entry_points_of(ENTRY_POINT_GROUP), key=lambda entry_point: (entry_point.name, _owner(entry_point)))


def _owner(entry_point: EntryPoint) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "an unknown distribution"


def _described(entry_point: EntryPoint) -> str:
    return f"{entry_point.name} ({_owner(entry_point)})"
