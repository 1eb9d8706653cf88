"""Finds the training engine that a suite's user names: an installed one, or a class in a file that is not installed yet."""

from __future__ import annotations

from weightlane.ckpt_engines.conformance.processes.resolve import class_at, is_place

from ...engines.contract import TrainingEngine
from ...engines.registry import training_engine_class


def engine_class(name: str) -> type[TrainingEngine]:
    """Return the engine class of an installed training engine, or of ``module:Class`` or ``path/to/file.py:Class``.

    Raises:
        ConfigError: There is no such engine, or it cannot be used.
        RegistryError: The class cannot be loaded, or is not a complete `TrainingEngine`.
    """
    return class_at(name, TrainingEngine) if is_place(name) else training_engine_class(name)  # type: ignore[type-abstract]
