"""Finds the rollout engine that a suite's user names: an installed one, or a class in a file that is not installed yet."""

from __future__ import annotations

from weightlane.ckpt_engines.conformance.processes.resolve import class_at, is_place

from ..contract.engine import RolloutEngine
from ..contract.registry import registered_rollout_engine


def engine_class(name: str) -> type[RolloutEngine]:
    """Return the engine class of an installed rollout engine, or of ``module:Class`` or ``path/to/file.py:Class``.

    Raises:
        ConfigError: There is no such engine, or it cannot be used.
        RegistryError: The class cannot be loaded, or is not a complete `RolloutEngine`.
    """
    return class_at(name, RolloutEngine) if is_place(name) else registered_rollout_engine(name)  # type: ignore[type-abstract]
