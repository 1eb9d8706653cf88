"""The reward of the GSM8K recipes: the last number of the completion, compared as a number."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def right_number(completion: str, task: Mapping[str, Any]) -> float:
    """1.0 when the last number in `completion` is the reference answer, 0.0 otherwise."""
    numbers = NUMBER.findall(completion)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(task["answer"]))
