"""Environments by name, from the entry-point group ``weightlane.environments``, or by the class of a user's own module."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import ValidationError

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.registered_class import registered_class

from ...config import EnvironmentConfig
from ...data.named_function import function_named
from .contract import Environment, EnvironmentContext

GROUP = "weightlane.environments"
_PART = "environment"


def environment_class(name: str, search_path: Sequence[Path] = ()) -> type[Environment]:
    """Return the class that is registered as `name`, or that ``"module:Class"`` names. Raises `ConfigError` otherwise."""
    if ":" not in name:
        return registered_class(GROUP, name, Environment, what="environment", extra="hf")  # type: ignore[type-abstract]
    found = function_named(name, search_path, part=_PART, setting="environment.name")
    if not (isinstance(found, type) and issubclass(found, Environment)):
        raise ConfigError(f"{name!r} is not a subclass of Environment.", part=_PART, hint="Set environment.name.")
    if missing := sorted(found.__abstractmethods__):
        raise ConfigError(f"{name!r} does not implement {', '.join(missing)}.", part=_PART)
    return found


def make_environment(config: EnvironmentConfig, context: EnvironmentContext) -> Environment | None:
    """Make the environment that `config` names, with its options; None if it names none.

    Raises `ConfigError` for an unknown name, and for options that the environment's own type refuses.
    """
    if config.name is None:
        return None
    chosen = environment_class(config.name, context.search_path)
    try:
        options = chosen.options_type.model_validate(dict(config.options))
    except ValidationError as error:
        problems = [f"environment.options.{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
        known = ", ".join(chosen.options_type.model_fields) or "none"
        raise ConfigError(
            "; ".join(problems) + ".", part=f"environment {config.name}", hint=f"Its options: {known}."
        ) from None
    return chosen(options, context)
