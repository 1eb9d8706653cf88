"""Carries a typed error through an RPC layer that keeps only an exception's text.

vLLM turns whatever a worker raises into ``Exception("Call to ... failed: ...")``. The worker side therefore puts the error as
JSON into its message, and the side that owns the engine reads it back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from weightlane.ckpt_engines import WeightlaneError, error_from_wire

_MARK = "weightlane-error:"


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """What went wrong in a rollout rank."""

    error: WeightlaneError
    intact: bool
    """Whether the weights that served before are still in place, untouched, in every rank of the replica."""


class RemoteFailureError(RuntimeError):
    """A `RemoteFailure` on its way through vLLM; its text holds the error as plain data."""

    def __init__(self, failure: RemoteFailure) -> None:
        data = json.dumps({"error": failure.error.to_wire(), "intact": failure.intact})
        super().__init__(f"{failure.error} [{_MARK}{data}]")
        self.failure = failure


def failure_from_text(text: str, *, part: str) -> RemoteFailure:
    """The failure that `text` carries; for any other text a plain error that quotes it and promises nothing."""
    _, mark, data = text.partition(_MARK)
    if mark:
        try:
            found, _ = json.JSONDecoder().raw_decode(data)
            return RemoteFailure(error_from_wire(found["error"]), bool(found["intact"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # A cut message: what is left of the text is all there is to tell.
    return RemoteFailure(WeightlaneError(text, part=part), intact=False)
