"""Errors that the suite's processes send as JSON to the check that asked them."""

from __future__ import annotations

from typing import Any

from ... import errors
from ...errors import WeightlaneError, error_from_wire

_EXPECTED = "expected "
"""The first word of every failure that the suite reports. An engine's own AssertionError is an untyped error."""


class UntypedError(AssertionError):
    """An engine raised an error that is not one of weightlane's: `who` is the call and the half, `said` the end of a sentence."""

    def __init__(self, who: str, said: str) -> None:
        super().__init__(f"expected one of weightlane's errors from {who}, or none; {said}")
        self.said = said


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Return `error` as plain data. An engine's own error type becomes the nearest weightlane type that it derives from."""
    if isinstance(error, AssertionError) and str(error).startswith(_EXPECTED):
        return {"failed": str(error)}
    if not isinstance(error, WeightlaneError):
        return {"untyped": f"{type(error).__name__}: {error}"}
    known = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return {**error.to_wire(), "type": known}


def error_from_json(data: dict[str, Any], who: str) -> WeightlaneError | AssertionError:
    """Return the error that `error_to_json` turned into plain data."""
    if "failed" in data:
        return AssertionError(data["failed"])
    if "untyped" in data:
        return UntypedError(who, f"it raised {data['untyped']}")
    return error_from_wire(data)
