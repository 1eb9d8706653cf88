"""Errors of the suite's processes as plain data, with what a check asks of them."""

from __future__ import annotations

from typing import Any

from ... import errors
from ...errors import WeightlaneError, error_from_wire

_EXPECTED = "expected "
"""How every failure of the suite begins; what an engine asserts itself is an error like any other."""


class UntypedError(AssertionError):
    """An engine raised something that is not one of weightlane's errors.

    Args:
        who: The call and the half.
        said: What it raised, as the end of a sentence.
    """

    def __init__(self, who: str, said: str) -> None:
        super().__init__(f"expected one of weightlane's errors from {who}, or none; {said}")
        self.said = said


def error_to_line(error: BaseException) -> dict[str, Any]:
    """An error as plain data. One of an engine's own types travels as the nearest of weightlane's that it derives from."""
    if isinstance(error, AssertionError) and str(error).startswith(_EXPECTED):
        return {"failed": str(error)}
    if not isinstance(error, WeightlaneError):
        return {"untyped": f"{type(error).__name__}: {error}"}
    known = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return {**error.to_wire(), "type": known}


def error_from_line(data: dict[str, Any], who: str) -> WeightlaneError | AssertionError:
    """The error that `error_to_line` turned into plain data."""
    if "failed" in data:
        return AssertionError(data["failed"])
    if "untyped" in data:
        return UntypedError(who, f"it raised {data['untyped']}")
    return error_from_wire(data)
