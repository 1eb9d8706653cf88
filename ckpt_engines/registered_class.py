"""Finds a class that an installed distribution registers under a name: training engines, rollout engines."""

from __future__ import annotations

import difflib
from importlib.metadata import EntryPoint
from typing import TypeVar

from weightlane.plugins.entry_points import entry_points_of

from .errors import ConfigError

_Class = TypeVar("_Class")


def registered_names(group: str) -> list[str]:
    """List every name that is registered in an entry-point group, sorted. Imports nothing."""
    return sorted({entry_point.name for entry_point in entry_points_of(group)})


def registered_class(group: str, name: str, base: type[_Class], *, what: str, extra: str) -> type[_Class]:
    """Return the class that is registered in `group` as `name`, a complete subclass of `base`.

    Args:
        group: The entry-point group.
        name: The name.
        base: The contract.
        what: What the classes are, for messages, such as ``"training engine"``.
        extra: The extra of weightlane that installs what its own classes need, if it has none of the class's name.

    Raises `ConfigError` when no distribution or more than one offers it, when it cannot be imported, or when it is not such a
    class.
    """
    part = f"{what} registry"
    found = entry_points_of(group, name)
    if not found:
        known = registered_names(group)
        nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        guess = f"Did you mean {nearest[0]!r}? " if nearest else ""
        raise ConfigError(
            f"no {what} is called {name!r}.", part=part, hint=f"{guess}Installed: {', '.join(known) or 'none'}."
        )
    if len(found) > 1:
        owners = " and ".join(sorted(f"{_owner(entry_point)} {entry_point.value}" for entry_point in found))
        raise ConfigError(
            f"{name!r} is registered twice, as {owners}.", part=part, hint="Uninstall one of the distributions."
        )
    (entry_point,) = found
    try:
        loaded = entry_point.load()
    except Exception as cause:
        raise ConfigError(
            f"{what} {name!r} could not be imported from {entry_point.value}: {type(cause).__name__}: {cause}.",
            part=part,
            hint=_how_to_install(entry_point, extra),
        ) from cause
    if not (isinstance(loaded, type) and issubclass(loaded, base)):
        raise ConfigError(f"{name!r} ({entry_point.value}) is not a {base.__name__} class.", part=part)
    if missing := sorted(getattr(loaded, "__abstractmethods__", ())):
        raise ConfigError(f"{name!r} ({entry_point.value}) does not implement {', '.join(missing)}.", part=part)
    return loaded


def _owner(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist else "an unknown distribution"


def _how_to_install(entry_point: EntryPoint, extra: str) -> str:
    """Return the sentence that says how to install what a class needs: an extra of its name, or else `extra` of weightlane."""
    owner, offered = "the distribution", list[str]()
    if entry_point.dist is not None:
        owner, offered = entry_point.dist.name, entry_point.dist.metadata.get_all("Provides-Extra") or []
    if entry_point.name in offered:
        extra = entry_point.name
    elif owner != "weightlane":
        return f"Install what it needs, or reinstall {owner}."
    return f"Install what it needs: pip install '{owner}[{extra}]'."
