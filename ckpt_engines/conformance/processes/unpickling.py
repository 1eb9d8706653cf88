"""Counts how often Python code of this process unpickles something."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any


class UnpicklingCounter:
    """Replaces `pickle.load`, `pickle.loads` and `pickle.Unpickler` when it is constructed, and counts loads in `count`."""

    def __init__(self) -> None:
        self.count = 0
        counter = self

        class CountedUnpickler(pickle.Unpickler):
            def load(self) -> Any:
                counter.count += 1
                return super().load()

        pickle.load, pickle.loads = self._counted(pickle.load), self._counted(pickle.loads)
        pickle.Unpickler = CountedUnpickler  # type: ignore[misc]

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return function(*arguments, **options)

        return wrapper
