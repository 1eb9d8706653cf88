"""Finds the observers that installed distributions and the environment ask for."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from .builtin import OBSERVERS
from .hooks import RunHooks

ENTRY_POINT_GROUP = "weightlane.plugins"
"""Installed distributions register observers here: a module, an object, or a class, which is instantiated without arguments."""


def make_hooks(observers: Iterable[object] = ()) -> RunHooks:
    """Hooks that call `observers` and those that distributions register under ``weightlane.plugins``.

    A plugin that cannot be loaded is reported and left out: see `RunHooks.reports`.
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
    """The hooks of this process, made at the first call: installed plugins, and built-in observers the environment asks for.

    What a part of weightlane calls that was given no hooks of its own. The variables are those of
    `weightlane.plugins.builtin.OBSERVERS`.
    """
    return _PROCESS.get()


class _Process:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: RunHooks | None = None

    def get(self) -> RunHooks:
        if self._hooks is None:
            with self._lock:
                if self._hooks is None:
                    self._hooks = _from_environment()
        return self._hooks


_PROCESS = _Process()


def _forked() -> None:
    """A forked child is a process of its own, with observers of its own."""
    global _PROCESS  # noqa: PLW0603 - one per process is the point
    _PROCESS = _Process()


os.register_at_fork(after_in_child=_forked)


def _from_environment() -> RunHooks:
    hooks = make_hooks()
    for builtin in OBSERVERS:
        if value := os.environ.get(builtin.variable):
            try:
                observer = builtin.make(value)
            except Exception as error:  # noqa: BLE001 - a library that is not installed, a port that is taken
                hooks.report(f"{builtin.name} (asked for by {builtin.variable})", "", error)
            else:
                hooks.register(observer, builtin.name)
    return hooks


def _installed() -> list[EntryPoint]:
    return sorted(
        entry_points(group=ENTRY_POINT_GROUP), key=lambda entry_point: (entry_point.name, _owner(entry_point))
    )


def _owner(entry_point: EntryPoint) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "an unknown distribution"


def _described(entry_point: EntryPoint) -> str:
    return f"{entry_point.name} ({_owner(entry_point)})"
