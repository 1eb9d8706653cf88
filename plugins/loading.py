"""Loads the observers that installed distributions register and that environment variables request."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points

from .builtin import OBSERVERS
from .hooks import RunHooks

ENTRY_POINT_GROUP = "weightlane.plugins"
"""Entry-point group of observers. An entry is a module, an object, or a class, which is instantiated without arguments."""


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

    They call installed plugins, and the built-in observers whose environment variables are set: see
    `weightlane.plugins.builtin.OBSERVERS`. The first call makes them.
    """
    return _PROCESS.get()


class _ProcessHooks:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hooks: RunHooks | None = None

    def get(self) -> RunHooks:
        with self._lock:
            if self._hooks is None:
                self._hooks = _from_environment()
            return self._hooks


_PROCESS = _ProcessHooks()


def _replace_in_child() -> None:
    """Give a forked child hooks of its own."""
    global _PROCESS  # noqa: PLW0603 - each process has one
    _PROCESS = _ProcessHooks()


os.register_at_fork(after_in_child=_replace_in_child)


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
    return sorted(
        entry_points(group=ENTRY_POINT_GROUP), key=lambda entry_point: (entry_point.name, _owner(entry_point))
    )


def _owner(entry_point: EntryPoint) -> str:
    return f"{entry_point.dist.name} {entry_point.dist.version}" if entry_point.dist else "an unknown distribution"


def _described(entry_point: EntryPoint) -> str:
    return f"{entry_point.name} ({_owner(entry_point)})"
