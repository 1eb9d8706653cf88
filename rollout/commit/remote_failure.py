"""Carries a typed error through vLLM's RPC, which keeps only an exception's text, and says in what state it leaves a replica.

vLLM turns every exception of a worker into ``Exception("Call to ... failed: ...")``. The worker therefore puts the error as JSON
into its message, and the process that owns the engine parses it.
"""

from __future__ import annotations

import json

from weightlane.ckpt_engines import QuarantinedError, UntouchedError, WeightlaneError, error_from_wire

_MARK = "weightlane-error:"


class RemoteFailureError(RuntimeError):
    """A failure of a rollout rank or of its server; the text contains the typed error as JSON.

    Attributes:
        error: The typed error.
        intact: Whether the old weights are certainly in place, unchanged, on every rank of the replica.
    """

    def __init__(self, error: WeightlaneError, *, intact: bool) -> None:
        super().__init__(f"{error} [{_MARK}{json.dumps({'error': error.to_wire(), 'intact': intact})}]")
        self.error, self.intact = error, intact


def failure_from_text(text: str, *, part: str) -> RemoteFailureError:
    """The failure that `text` carries, or an untyped error that quotes `text`, with `intact` False."""
    _, mark, data = text.partition(_MARK)
    if mark:
        try:
            found, _ = json.JSONDecoder().raw_decode(data)
            return RemoteFailureError(error_from_wire(found["error"]), intact=bool(found["intact"]))
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # The message was truncated, so that its text is all there is.
    return RemoteFailureError(WeightlaneError(text, part=part), intact=False)


def untouched(error: WeightlaneError, name: str) -> UntouchedError:
    """`error` as the `UntouchedError` of replica `name`, whose old version serves on: see `weightlane.sync.Replica`."""
    if isinstance(error, UntouchedError):
        return error
    return UntouchedError(
        f"the old weights are in place: {type(error).__name__}: {error}", part=name, peer=error.peer, hint=""
    )


def quarantined(error: WeightlaneError, name: str, state: str) -> QuarantinedError:
    """`error` as the `QuarantinedError` of replica `name`; the hint says which `state` the replica stays in."""
    if isinstance(error, QuarantinedError):
        return error
    return QuarantinedError(
        f"the commit failed and the weights cannot be trusted: {type(error).__name__}: {error}",
        part=name,
        hint=f"{state} until a complete version has been committed.",
    )
