"""The tool and the reward of the calculator example."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def multiply(a: int, b: int) -> int:
    """Multiplies two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    if not (isinstance(a, int) and isinstance(b, int)):
        raise TypeError("a and b must be whole numbers")
    return a * b


def exact_match(completion: str, task: Mapping[str, Any]) -> float:
    """1 if the model's last reply is the product and nothing else, 0 otherwise."""
    return float(completion == task["answer"])
