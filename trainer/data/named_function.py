"""Functions that a configuration names: built-in ones, or a user's own, which are imported."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from weightlane.ckpt_engines import ConfigError

_Config = TypeVar("_Config")


def built_in_or_own(
    name: str,
    built_in: Mapping[str, Callable[[_Config], Any]],
    config: _Config,
    search_path: Sequence[Path],
    *,
    part: str,
    setting: str,
) -> Any:
    """Return what `built_in` makes of `config` under `name`, or the user's own function: see `function_named`.

    Raises `ConfigError` if there is neither.
    """
    if name in built_in:
        return built_in[name](config)
    if ":" in name:
        return function_named(name, search_path, part=part, setting=setting)
    nearest = difflib.get_close_matches(name, built_in, n=1, cutoff=0.5)
    guess = f"Did you mean {nearest[0]!r}? " if nearest else ""
    raise ConfigError(
        f"{setting} is {name!r}, which is not built in.",
        part=part,
        hint=f"{guess}Built in: {', '.join(sorted(built_in))}; or name your own as 'module:function'.",
    )


def function_named(function: str, search_path: Sequence[Path], *, part: str, setting: str) -> Any:
    """Import ``"module:function"``; dots after the colon reach into classes.

    The module is looked for in `search_path` before installed packages. These folders are put at the front of ``sys.path`` in
    this order, and left there because the function may import its neighbours later. `part`, which imports it, and `setting`,
    which names it, are for errors.

    Raises `ConfigError` if the name is malformed, or nothing callable can be imported under it.
    """
    module_name, colon, attribute = function.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(f"{function!r} is not of the form 'module:function'.", part=part, hint=f"Set {setting}.")
    for folder in reversed([str(Path(folder).resolve()) for folder in search_path]):
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    try:
        found: Any = importlib.import_module(module_name)
    except Exception as cause:
        looked = ", ".join(str(folder) for folder in search_path) or "sys.path"
        raise ConfigError(
            f"the module of {function!r} could not be imported: {type(cause).__name__}: {cause}.",
            part=part,
            hint=f"Looked in {looked}, then among installed packages.",
        ) from cause
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ConfigError(
                f"{found.__name__} has no {name!r}, which {function!r} names.",
                part=part,
                hint=f"Its file is {getattr(sys.modules[module_name], '__file__', 'unknown')}.",
            )
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{function!r} is a {type(found).__name__}, not a function.", part=part)
    return found
