"""Carries a typed error through vLLM's RPC, which keeps only an exception's text.

vLLM turns every exception of a worker into ``Exception("Call to ... failed: ...")``. The worker therefore puts the error as JSON
into its message, and the process that owns the engine parses it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from weightlane.ckpt_engines import WeightlaneError, error_from_wire

_MARK = "weightlane-error:"


@dataclass(frozen=True, slots=True)
class RemoteFailure:
    """A failure of a rollout rank."""

    error: WeightlaneError
    intact: bool
    """Whether the old weights are still in place, unchanged, on every rank of the replica."""


class RemoteFailureError(RuntimeError):
    """The exception that carries a `RemoteFailure` through vLLM; its text contains the error as JSON."""

    def __init__(self, failure: RemoteFailure) -> None:
        data = json.dumps({"error": failure.error.to_wire(), "intact": failure.intact})
        super().__init__(f"{failure.error} [{_MARK}{data}]")
        self.failure = failure


def failure_from_text(text: str, *, part: str) -> RemoteFailure:
    """The failure that `text` carries, or an untyped error that quotes `text`, with `intact` False."""
    _, mark, data = text.partition(_MARK)
    if mark:
        try:
            found, _ = json.JSONDecoder().raw_decode(data)
            return RemoteFailure(error_from_wire(found["error"]), bool(found["intact"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # The message was truncated, so that its text is all there is.
    return RemoteFailure(WeightlaneError(text, part=part), intact=False)
