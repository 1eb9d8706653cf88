"""`CheckpointEngineRegistry`: finds checkpoint engines by name among the entry points of installed distributions."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from typing import Any

from pydantic import ValidationError

from weightlane.plugins.entry_points import entry_points_of

from .contract.capabilities import Capabilities
from .contract.engine import API_VERSION, CheckpointEngine, EngineConfig
from .contract.field_docs import document_fields
from .errors import (
    ConfigError,
    DuplicateEngineError,
    EngineContractError,
    EngineImportError,
    EngineUnavailableError,
    UnknownEngineError,
    WeightlaneError,
)
from .faulty.faulty_links import PREFIX as FAULTY
from .faulty.faulty_links import faulty
from .runtime.threads import within

GROUP = "weightlane.ckpt_engines"
LISTING_LIMIT_S = 30.0
"""Longest time for the import of one engine's module while engines are listed: more than any library needs, and no longer than
a person is willing to wait."""
_PART = "engine registry"
NAME_RULE = "A name begins with a lower-case letter, followed by lower-case letters, digits, - and _."
_AUTHOR = "Ask its author, or install a release made for this weightlane."
_NAME = re.compile(r"[a-z][a-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class EngineListing:
    """One row of ``weightlane engines``."""

    name: str
    """Name that users write as ``checkpoint_engine.backend``."""
    distribution: str
    """Name and version of the distribution that registers the engine."""
    capabilities: Capabilities | None
    """Capabilities that the engine declares; None when its class could not be loaded."""
    unavailable: str | None
    """Why the engine cannot be used here; None when it can."""


class CheckpointEngineRegistry:
    """The checkpoint engines that installed distributions register under ``weightlane.ckpt_engines``.

    Finding names reads metadata only. An engine's module is imported when that engine is requested.
    """

    def __init__(self) -> None:
        self._found: dict[str, list[EntryPoint]] = {}
        for entry_point in entry_points_of(GROUP):
            self._found.setdefault(entry_point.name, []).append(entry_point)

    def names(self) -> list[str]:
        """Return every registered name, sorted. Imports no engine."""
        return sorted(self._found)

    def engine_class(self, name: str) -> type[CheckpointEngine]:
        """Return the class registered as `name`, checked against the contract; ``faulty:NAME`` is NAME with injected faults.

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
        owner = f"{name!r} of distribution {_distribution(entry_point)}"
        if not is_engine_name(name):
            raise EngineContractError(f"{owner} has a name that cannot be used. {NAME_RULE}", part=_PART, hint=_AUTHOR)
        try:
            loaded = entry_point.load()
        except EngineContractError as error:  # raised while the class was being defined
            raise EngineContractError(
                f"{owner} has an invalid declaration: {error}", part=_PART, hint=_AUTHOR
            ) from error
        except KeyboardInterrupt:
            raise
        except BaseException as cause:  # a module may call sys.exit
            raise EngineImportError(
                f"{owner} could not be imported from {entry_point.value}: {type(cause).__name__}: {cause}.",
                part=_PART,
                hint=_install_hint(entry_point),
            ) from cause
        if problem := contract_breach(loaded):
            raise EngineContractError(f"{owner} {problem}.", part=_PART, hint=_AUTHOR)
        checked: type[CheckpointEngine] = loaded
        return checked

    def create(self, name: str, options: Mapping[str, Any] | None = None) -> CheckpointEngine:
        """Make an engine from the user's `options`, which the engine's own config type validates.

        Raises what `engine_class` raises, `EngineUnavailableError` if the engine cannot run here, or `ConfigError`.
        """
        cls = self.engine_class(name)
        if reason := why_unavailable(cls):
            usable = [row.name for row in self.list() if row.unavailable is None]
            raise EngineUnavailableError(
                f"{name} cannot run here: {reason}.", part=_PART, hint=f"Engines that can: {', '.join(usable)}."
            )
        engine = cls(self.validate_options(name, options))
        engine.registered_as = name
        return engine

    def validate_options(self, name: str, options: Mapping[str, Any] | None = None) -> EngineConfig:
        """Return `options` as the engine's typed config. Raises as `engine_class`, or `ConfigError` that names every bad key."""
        return checked_options(name, self.engine_class(name), options or {}, "checkpoint_engine.options.")

    def list(self) -> list[EngineListing]:
        """Return every registered engine with its capabilities and, where it cannot be used, the reason.

        Imports the engines' modules. If an engine's module raises, exits or hangs, that is its reason, after at most
        `LISTING_LIMIT_S` seconds, and the other engines are still listed.
        """
        return [self._listing(name) for name in self.names()]

    def _listing(self, name: str) -> EngineListing:
        capabilities: list[Capabilities] = []

        def reason() -> str | None:
            try:
                cls = self.engine_class(name)
                capabilities.append(cls.capabilities)
                return why_unavailable(cls)
            except WeightlaneError as error:
                return error.message
            except BaseException as error:  # noqa: BLE001 - in this thread a KeyboardInterrupt is the module's own
                return f"its module raised {type(error).__name__}: {error}"

        try:
            unavailable = within(LISTING_LIMIT_S, reason)
        except TimeoutError:
            what = "its availability check" if capabilities else "the import of its module"
            unavailable = f"{what} had not ended after {LISTING_LIMIT_S:g} s"
        owner = " and ".join(sorted(_distribution(entry_point) for entry_point in self._found[name]))
        return EngineListing(name, owner, capabilities[0] if capabilities else None, unavailable)

    def _suggest(self, name: str) -> str:
        nearest = difflib.get_close_matches(name, self.names(), n=1, cutoff=0.5)
        guess = f"Did you mean {nearest[0]!r}? " if nearest else ""
        return f"{guess}Installed: {', '.join(self.names()) or 'none'}."


def checked_options(
    name: str, cls: type[CheckpointEngine], options: Mapping[str, Any], prefix: str = ""
) -> EngineConfig:
    """Return `options` of the engine `name` as its typed config. Raises `ConfigError` with `prefix` before each bad key."""
    try:
        return cls.config_type.model_validate(dict(options))
    except ValidationError as error:
        problems = "; ".join(f"{prefix}{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
        known = ", ".join(cls.config_type.model_fields) or "none"
        raise ConfigError(f"{problems}.", part=f"engine {name}", hint=f"Options of {name}: {known}.") from None


def is_engine_name(name: str) -> bool:
    """Tell whether `name` follows `NAME_RULE`, so that it can be typed as ``checkpoint_engine.backend`` and ``faulty:NAME``."""
    return bool(_NAME.fullmatch(name))


def why_unavailable(cls: type[CheckpointEngine]) -> str | None:
    """Return why an engine cannot run here, or None when it can. An exception of its own check counts as a reason.

    Raises `EngineContractError` when the check returns anything but None or a non-blank string.
    """
    try:
        reason = cls.unavailable_reason()
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # noqa: BLE001 - third-party code, which may call sys.exit
        return f"its availability check failed: {type(error).__name__}: {error}"
    if reason is not None and not (isinstance(reason, str) and reason.strip()):
        raise EngineContractError(
            f"unavailable_reason() of {cls.__qualname__} returned {reason!r}; it must return None where the engine can run,"
            " and a short reason where it cannot.",
            part=_PART,
            hint=_AUTHOR,
        )
    return reason


def _distribution(entry_point: EntryPoint) -> str:
    dist = entry_point.dist
    return f"{dist.name} {dist.version}" if dist else "an unknown distribution"


def _install_hint(entry_point: EntryPoint) -> str:
    """Return the pip command for the extra that the entry point names (``name = "module:Class [extra]"``)."""
    name = entry_point.dist.name if entry_point.dist else "the distribution"
    if entry_point.extras:
        return f"Install what it needs: pip install '{name}[{','.join(entry_point.extras)}]'."
    return f"Install what it needs, or reinstall {name}."


def contract_breach(loaded: object) -> str | None:
    """Return how an entry point's object breaks the contract, as the end of a sentence; None when it keeps the contract."""
    if not (isinstance(loaded, type) and issubclass(loaded, CheckpointEngine)):
        return f"is not a CheckpointEngine class but {loaded!r}"
    version = getattr(loaded, "api_version", None)
    if version is None:
        return f"has no api_version: {loaded.__qualname__} must set api_version = {API_VERSION}"
    if version != API_VERSION:
        guide = 'the guide "Write an engine" in the documentation'
        return f"was written for engine API {version}, this weightlane has {API_VERSION} (see {guide})"
    if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        return f"does not implement {', '.join(missing)}"
    if not isinstance(getattr(loaded, "capabilities", None), Capabilities):
        return (
            f"declares no Capabilities: {loaded.__qualname__} must set capabilities = Capabilities(devices, delivery)"
        )
    return None


document_fields(__name__)
