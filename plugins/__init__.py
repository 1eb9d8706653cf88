"""Hooks for observers of weightlane: their specifications, the code that calls observers, and the built-in observers.

An observer is an object whose methods have the decorator `hookimpl`. `RunHooks` lists the hooks and calls the observers, which
cannot change what weightlane does.

    >>> from weightlane.plugins import hookimpl, make_hooks
    >>> class Printer:
    ...     @hookimpl
    ...     def version_committed(self, version, facts):
    ...         print("now serving", version)
    >>> hooks = make_hooks([Printer()])
    >>> hooks.version_committed(version=3, facts={})
    now serving 3
"""

from .disabled_plugins import HookReport
from .hooks import HOOK_NAMES, Facts, RunHooks, hookimpl
from .loading import ENTRY_POINT_GROUP, make_hooks, process_hooks

__all__ = [
    "ENTRY_POINT_GROUP",
    "HOOK_NAMES",
    "Facts",
    "HookReport",
    "RunHooks",
    "hookimpl",
    "make_hooks",
    "process_hooks",
]
