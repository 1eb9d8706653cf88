"""Hook specifications (pluggy), and what calls the observers of a run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

import pluggy

PROJECT = "weightlane"
ENTRY_POINT_GROUP = "weightlane.plugins"
"""Installed distributions register observers here."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Facts = Mapping[str, Any]
"""JSON-representable facts about an event; keys carry their unit (``_s``, ``_bytes``)."""


class RunHooks:
    """The points at which a run calls its observers, on the thread of the training loop."""

    @hookspec
    def run_started(self, facts: Facts) -> None:
        """Every participant is connected and the first version serves."""

    @hookspec
    def training_step(self, step: int, facts: Facts) -> None:
        """The optimizer took a step: reward, loss, staleness, tokens per second, seconds blocked."""

    @hookspec
    def version_committed(self, version: int, facts: Facts) -> None:
        """Every replica serves `version`: latency, seconds blocked, bytes."""

    @hookspec
    def version_aborted(self, version: int, facts: Facts) -> None:
        """`version` was given up; ``facts["error"]`` says why."""

    @hookspec
    def evaluated(self, step: int, facts: Facts) -> None:
        """Held-out accuracy was measured."""

    @hookspec
    def run_ended(self, facts: Facts) -> None:
        """The run is over, well or not; ``facts`` is its summary."""


def make_hooks(observers: Iterable[object] = ()) -> RunHooks:
    """The hooks of a run: calling one calls `observers` and those that distributions register under ``weightlane.plugins``.

    Hooks are called by keyword only.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(RunHooks)
    manager.load_setuptools_entrypoints(ENTRY_POINT_GROUP)
    for observer in observers:
        manager.register(observer)
    # pluggy's relay has the methods of the specification, which its type cannot say.
    return cast("RunHooks", manager.hook)
