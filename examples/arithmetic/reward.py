"""The reward of the arithmetic demo: exact match."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def exact_match(completion: str, task: Mapping[str, Any]) -> float:
    """1.0 when the completion is the reference answer and nothing else, 0.0 otherwise."""
    return float(completion == task["answer"])
