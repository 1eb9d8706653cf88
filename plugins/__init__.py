"""Observing a run: hook specifications, and what calls the observers.

Observers are plain objects whose methods carry `hookimpl`; a run calls them at the points `RunHooks` lists. They watch, they
do not steer.

    >>> from weightlane.plugins import hookimpl, make_hooks
    >>> class Printer:
    ...     @hookimpl
    ...     def version_committed(self, version, facts):
    ...         print("now serving", version)
    >>> hooks = make_hooks([Printer()])
    >>> _ = hooks.version_committed(version=3, facts={})
    now serving 3
"""

from .hooks import RunHooks, hookimpl, make_hooks

__all__ = ["RunHooks", "hookimpl", "make_hooks"]
