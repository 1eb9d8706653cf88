"""The user's reward function: finding it, calling it, and refusing what is not a number."""

from __future__ import annotations

import importlib
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError

_PART = "reward"


class Reward:
    """A reward function given as ``"module:function"``, called as ``function(completion: str, task: Mapping) -> float``.

    Args:
        function: module and function; dots after the colon reach into classes.
        search_path: folders in which the module is looked for before installed packages; put at the front of ``sys.path``
            in this order, and left there because the function may import its neighbours later.

    Raises `ConfigError` when the name is malformed, or nothing callable can be imported under it.
    """

    def __init__(self, function: str, search_path: Sequence[Path] = ()) -> None:
        self.name = function
        self._function = _resolve(function, search_path)

    def __call__(self, completion: str, task: Mapping[str, Any]) -> float:
        """Judge `completion`.

        Raises `ConfigError`, naming the function, the prompt and the value, when the function raises or does not return a
        finite real number.
        """
        prompt = task.get("prompt")
        try:
            value = self._function(completion, task)
        except Exception as cause:
            raise ConfigError(
                f"{self.name} raised {type(cause).__name__}: {cause} for prompt {prompt!r} and completion {completion!r}.",
                part=_PART,
                hint="Fix the reward function.",
            ) from cause
        number = _as_float(value)
        if number is None or not math.isfinite(number):
            raise ConfigError(
                f"{self.name} returned {value!r} for prompt {prompt!r} and completion {completion!r}.",
                part=_PART,
                hint="A reward must be a finite number.",
            )
        return number


def _as_float(value: object) -> float | None:
    """`value` as a float if it is a number (numpy and torch scalars included), else None."""
    if isinstance(value, numbers.Real):
        return float(value)
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", None) == 0:
        inner = item()
        return float(inner) if isinstance(inner, numbers.Real) else None
    return None


def _resolve(function: str, search_path: Sequence[Path]) -> Callable[[str, Mapping[str, Any]], object]:
    module_name, colon, attribute = function.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"{function!r} is not of the form 'module:function'.", part=_PART, hint="Set reward.function."
        )
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
            part=_PART,
            hint=f"Looked in {looked}, then among installed packages.",
        ) from cause
    for name in attribute.split("."):
        if not hasattr(found, name):
            raise ConfigError(
                f"{found.__name__} has no {name!r}, which {function!r} names.",
                part=_PART,
                hint=f"Its file is {getattr(sys.modules[module_name], '__file__', 'unknown')}.",
            )
        found = getattr(found, name)
    if not callable(found):
        raise ConfigError(f"{function!r} is a {type(found).__name__}, not a function.", part=_PART)
    resolved: Callable[[str, Mapping[str, Any]], object] = found
    return resolved
