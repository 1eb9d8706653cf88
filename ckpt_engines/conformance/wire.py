"""Errors of the suite's processes as plain data, with what a check asks of them."""

from __future__ import annotations

from typing import Any

from .. import errors
from ..errors import WeightlaneError, error_from_wire


class UntypedError(AssertionError):
    """An engine raised something that is not one of weightlane's errors."""


def error_to_line(error: BaseException) -> dict[str, Any]:
    """An error as plain data. One of an engine's own types travels as the nearest of weightlane's that it derives from."""
    if not isinstance(error, WeightlaneError):
        return {"untyped": f"{type(error).__name__}: {error}"}
    known = next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == errors.__name__)
    return {**error.to_wire(), "type": known}


def error_from_line(data: dict[str, Any], who: str) -> WeightlaneError | UntypedError:
    """The error that `error_to_line` turned into plain data."""
    if "untyped" in data:
        return UntypedError(f"{who} raised {data['untyped']}, which is not one of weightlane's errors")
    return error_from_wire(data)
