"""Loads the observers that installed distributions register and that environment variables request."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
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


OBSERVERS: Mapping[str, Callable[[str], object]] = {
    TRACE_ENV: trace_from_environment,
    PROFILE_ENV: profiler_from_environment,
    TENSORBOARD_ENV: tensorboard_from_environment,
    PROMETHEUS_ENV: prometheus_from_environment,
    WANDB_ENV: tracker_from_environment("wandb"),
    MLFLOW_ENV: tracker_from_environment("mlflow"),
    TRACKIO_ENV: tracker_from_environment("trackio"),
}
"""Makes each built-in observer, by the environment variable that requests it, from its value: a path, an address or a project."""


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
    for variable, make in OBSERVERS.items():
        if value := os.environ.get(variable):
            name = variable.removeprefix("WEIGHTLANE_").lower()
            try:
                observer = make(value)
            except Exception as error:  # noqa: BLE001 - for example a missing library or a port in use
                hooks.report(f"{name} (requested by {variable})", "", error)
            else:
                hooks.register(observer, name)
    return hooks


def _installed() -> list[EntryPoint]:
    return sorted(entry_points_of(ENTRY_POINT_GROUP), key=lambda entry_point: (entry_point.name, _owner(entry_point)))


def _owner(entry_point: EntryPoint) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "an unknown distribution"


def _described(entry_point: EntryPoint) -> str:
    return f"{entry_point.name} ({_owner(entry_point)})"
