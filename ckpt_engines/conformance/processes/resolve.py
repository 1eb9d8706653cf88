"""Finds the engine that a suite's user names: an installed one, or a class in a file that is not installed yet."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from ...contract.engine import CheckpointEngine
from ...errors import EngineContractError, EngineImportError, EngineUnavailableError
from ...registry import CheckpointEngineRegistry, checked_options, contract_breach, why_unavailable

_Class = TypeVar("_Class")
_PART = "conformance"
_REGISTRY_PREFIXES = ("faulty",)
"""Names with a colon that are not ``module:Class``: ``faulty:shm`` is an installed engine."""


def engine_class(name: str) -> type[CheckpointEngine]:
    """Return the class of the engine `name`: an installed one, ``module:Class``, or ``path/to/file.py:Class``.

    Raises `RegistryError` when there is no such engine, or it cannot be used.
    """
    if not is_place(name):
        return CheckpointEngineRegistry().engine_class(name)
    loaded = loaded_from(name)
    if problem := contract_breach(loaded):
        raise EngineContractError(f"{name} {problem}.", part=_PART)
    checked: type[CheckpointEngine] = loaded
    return checked


def is_place(name: str) -> bool:
    """Whether `name` is ``module:Class`` or ``path/to/file.py:Class``, and not the name of an installed engine."""
    place, colon, _ = name.rpartition(":")
    return bool(colon) and place not in _REGISTRY_PREFIXES


def loaded_from(name: str) -> Any:
    """Return the object at `name`, ``module:Class`` or ``path/to/file.py:Class``.

    Raises `EngineImportError` when it cannot be loaded, and `EngineContractError` when its declaration is invalid.
    """
    place, _, attribute = name.rpartition(":")
    try:
        return getattr(_module(place), attribute)
    except EngineContractError as error:  # the class could not even be defined
        raise EngineContractError(f"{name} has an invalid declaration: {error}", part=_PART) from error
    except KeyboardInterrupt:
        raise
    except BaseException as cause:  # a module may call sys.exit
        raise EngineImportError(
            f"{attribute!r} could not be loaded from {place}: {type(cause).__name__}: {cause}.",
            part=_PART,
            hint="Name an installed engine (see `weightlane engines`), module:Class, or file.py:Class.",
        ) from cause


def class_at(place: str, base: type[_Class]) -> type[_Class]:
    """Return the class at `place`, a complete subclass of `base`. Raises as `loaded_from`."""
    loaded = loaded_from(place)
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise EngineContractError(f"{place} is not a {base.__name__} class.", part=_PART)
    if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        raise EngineContractError(f"{place} does not implement {', '.join(missing)}.", part=_PART)
    return loaded


def create_engine(name: str, options: Mapping[str, Any]) -> CheckpointEngine:
    """Make an engine from `options`. Raises the errors of `CheckpointEngineRegistry.create`."""
    cls = engine_class(name)
    if reason := why_unavailable(cls):
        raise EngineUnavailableError(f"{name} cannot run here: {reason}.", part=_PART)
    return cls(checked_options(name, cls, options))


@functools.cache
def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place).resolve()
    name = f"weightlane_conformance_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pydantic look up their own module there
    spec.loader.exec_module(module)
    return module
