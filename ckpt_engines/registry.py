"""`CheckpointEngineRegistry`: from a backend name to an engine, by entry point."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from pydantic import ValidationError

from .contract import API_VERSION, WHAT_CHANGED, Capabilities, CheckpointEngine, Delivery, EngineConfig
from .errors import (
    ConfigError,
    DuplicateEngineError,
    EngineContractError,
    EngineImportError,
    EngineUnavailableError,
    UnknownEngineError,
    WeightlaneError,
)
from .faulty import PREFIX as FAULTY
from .faulty import faulty

GROUP = "weightlane.ckpt_engines"
_PART = "engine registry"


@dataclass(frozen=True, slots=True)
class EngineListing:
    """One row of ``weightlane engines``."""

    name: str
    distribution: str
    """Name and version of the distribution that registers the engine."""
    capabilities: Capabilities | None
    """None when the engine's class could not be loaded."""
    unavailable: str | None
    """Why the engine cannot be used here; None when it can."""


class CheckpointEngineRegistry:
    """Resolves checkpoint engines that installed distributions register under ``weightlane.ckpt_engines``.

    Finding names reads metadata only; an engine's module is imported when that engine is asked for.
    """

    def __init__(self) -> None:
        self._found: dict[str, list[EntryPoint]] = {}
        for entry_point in entry_points(group=GROUP):
            self._found.setdefault(entry_point.name, []).append(entry_point)

    def names(self) -> list[str]:
        """Every registered name, sorted. Imports no engine."""
        return sorted(self._found)

    def engine_class(self, name: str) -> type[CheckpointEngine]:
        """The class behind `name`, checked against the contract; ``faulty:NAME`` is NAME with injected faults.

        Raises `UnknownEngineError`, `DuplicateEngineError`, `EngineImportError` or `EngineContractError`.
        """
        if name.startswith(FAULTY):
            return faulty(self._installed_class(name.removeprefix(FAULTY)))
        return self._installed_class(name)

    def _installed_class(self, name: str) -> type[CheckpointEngine]:
        candidates = self._found.get(name, [])
        if not candidates:
            raise UnknownEngineError(f"no checkpoint engine is called {name!r}.", part=_PART, hint=self._suggest(name))
        if len(candidates) > 1:
            owners = " and ".join(sorted(_distribution(candidate) for candidate in candidates))
            raise DuplicateEngineError(
                f"{name!r} is registered by {owners}.", part=_PART, hint="Uninstall one of these distributions."
            )
        (entry_point,) = candidates
        try:
            loaded = entry_point.load()
        except Exception as cause:
            raise EngineImportError(
                f"{name!r} of distribution {_distribution(entry_point)} could not be imported from"
                f" {entry_point.value}: {type(cause).__name__}: {cause}.",
                part=_PART,
                hint=_install_hint(entry_point),
            ) from cause
        return _checked(name, loaded, entry_point)

    def create(self, name: str, options: Mapping[str, Any] | None = None) -> CheckpointEngine:
        """An engine made from the user's `options`, which the engine's own config type validates.

        Raises what `engine_class` raises, `EngineUnavailableError` if the engine cannot run here, or `ConfigError`.
        """
        cls = self.engine_class(name)
        if reason := _reason(cls):
            usable = [row.name for row in self.list() if row.unavailable is None]
            raise EngineUnavailableError(
                f"{name} cannot run here: {reason}.", part=_PART, hint=f"Engines that can: {', '.join(usable)}."
            )
        return cls(self.validate_options(name, options))

    def validate_options(self, name: str, options: Mapping[str, Any] | None = None) -> EngineConfig:
        """`options` as the engine's typed config, or a `ConfigError` that names every bad key."""
        config_type = self.engine_class(name).config_type
        try:
            return config_type.model_validate(dict(options or {}))
        except ValidationError as error:
            known = list(config_type.model_fields)
            problems = "; ".join(
                f"checkpoint_engine.options.{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
            )
            raise ConfigError(
                f"{problems}.",
                part=f"engine {name}",
                hint=f"Options of {name}: {', '.join(known) or 'none'}.",
            ) from None

    def list(self) -> list[EngineListing]:
        """Every registered engine with its capabilities and, where it cannot be used, the reason."""
        rows = []
        for name in self.names():
            owner = " and ".join(sorted(_distribution(entry_point) for entry_point in self._found[name]))
            try:
                cls = self.engine_class(name)
            except WeightlaneError as error:
                rows.append(EngineListing(name, owner, None, error.message))
            else:
                rows.append(EngineListing(name, owner, cls.capabilities, _reason(cls)))
        return rows

    def _suggest(self, name: str) -> str:
        nearest = difflib.get_close_matches(name, self.names(), n=1, cutoff=0.5)
        guess = f"Did you mean {nearest[0]!r}? " if nearest else ""
        return f"{guess}Installed: {', '.join(self.names()) or 'none'}."


def _reason(cls: type[CheckpointEngine]) -> str | None:
    """Why the engine cannot run here; that its own check fails is a reason too, and must not hide the other engines."""
    try:
        return cls.unavailable_reason()
    except Exception as error:  # noqa: BLE001 - third-party code
        return f"its availability check failed: {type(error).__name__}: {error}"


def _distribution(entry_point: EntryPoint) -> str:
    dist = entry_point.dist
    return f"{dist.name} {dist.version}" if dist else "an unknown distribution"


def _install_hint(entry_point: EntryPoint) -> str:
    """The pip command for the extra that the entry point names (``name = "module:Class [extra]"``), else a general hint."""
    name = entry_point.dist.name if entry_point.dist else "the distribution"
    if entry_point.extras:
        return f"Install what it needs: pip install '{name}[{','.join(entry_point.extras)}]'."
    return f"Install what it needs, or reinstall {name}."


def _checked(name: str, loaded: object, entry_point: EntryPoint) -> type[CheckpointEngine]:
    def broken(why: str, change: str = "") -> EngineContractError:
        return EngineContractError(
            f"{name!r} of distribution {_distribution(entry_point)} {why}.",
            part=_PART,
            hint=f"{change and change + ' '}Ask its author, or install a release made for this weightlane.",
        )

    if not (isinstance(loaded, type) and issubclass(loaded, CheckpointEngine)):
        raise broken(f"is not a CheckpointEngine class but {loaded!r}")
    version = getattr(loaded, "api_version", None)
    if version != API_VERSION:
        raise broken(f"was written for engine API {version}, this weightlane has {API_VERSION}", WHAT_CHANGED)
    if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        raise broken(f"does not implement {', '.join(missing)}")
    capabilities = getattr(loaded, "capabilities", None)
    if not isinstance(capabilities, Capabilities):
        raise broken("declares no Capabilities")
    if not capabilities.devices or not all(isinstance(device, str) for device in capabilities.devices):
        raise broken("declares capabilities without a device")
    if not capabilities.delivery or not all(isinstance(item, Delivery) for item in capabilities.delivery):
        raise broken("declares capabilities without a way of delivery")
    if not (isinstance(loaded.config_type, type) and issubclass(loaded.config_type, EngineConfig)):
        raise broken("has a config_type that is not an EngineConfig")
    return loaded
