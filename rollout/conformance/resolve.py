"""Finds the rollout engine that a suite's user names: an installed one, or a class in a file that is not installed yet."""

from __future__ import annotations

from weightlane.ckpt_engines import EngineContractError
from weightlane.ckpt_engines.conformance.processes.resolve import is_place, loaded_from

from ..contract.engine import RolloutEngine
from ..contract.registry import registered_rollout_engine


def engine_class(name: str) -> type[RolloutEngine]:
    """Return the engine class of an installed rollout engine, or of ``module:Class`` or ``path/to/file.py:Class``.

    Raises:
        ConfigError: There is no such engine, or it cannot be used.
        RegistryError: The class cannot be loaded, or is not a complete `RolloutEngine`.
    """
    if not is_place(name):
        return registered_rollout_engine(name)
    loaded = loaded_from(name)
    if not (isinstance(loaded, type) and issubclass(loaded, RolloutEngine)):
        raise EngineContractError(f"{name} is not a RolloutEngine class.", part="conformance")
    if missing := sorted(loaded.__abstractmethods__):
        raise EngineContractError(f"{name} does not implement {', '.join(missing)}.", part="conformance")
    return loaded
