"""`ServerCalls`: HTTP calls to a vLLM server, whose failures say whether the old weights are in place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

from weightlane.ckpt_engines import ConfigError, WeightlaneError

from ..commit.remote_failure import RemoteFailureError, failure_from_text
from ..contract.http_calls import MAX_QUOTED, HttpCalls, message_of

_UNAUTHORIZED = (401, 403)
_NOT_FOUND = (404, 405)


class ServerCalls(HttpCalls):
    """Calls to one server. Each raises a `RemoteFailureError` if it fails."""

    async def get(self, path: str, limit_s: float, **query: str) -> dict[str, Any]:
        """The JSON object at `path`."""
        with _remote():
            return await super().get(path, limit_s, **query)

    async def post(self, path: str, body: Mapping[str, Any], limit_s: float, **query: str) -> str:
        """Post `body` to `path`, whose answer has to be a JSON object."""
        with _remote():
            text = await super().post(path, body, limit_s, **query)
            self.parsed(path, text)
        return text

    def refuse(self, call: str, status: int, text: str) -> NoReturn:
        """See `refusal`."""
        raise refusal(call, status, text, part=self.part, peer=self.url)


@contextmanager
def _remote() -> Iterator[None]:
    try:
        yield
    except WeightlaneError as error:  # no server has said it: with a wrong address, nothing has been called
        raise RemoteFailureError(error, intact=isinstance(error, ConfigError)) from error


def refusal(call: str, status: int, text: str, *, part: str, peer: str) -> RemoteFailureError:
    """The failure that a server `peer` has answered a `call` with, such as ``POST /update_weights``."""
    refusals = {
        _UNAUTHORIZED: (f"{call} was refused with status {status}.", "Check the token."),
        _NOT_FOUND: (
            f"the server has no {call}.",
            "Start vLLM with VLLM_SERVER_DEV_MODE=1, which turns its weight-transfer endpoints on.",
        ),
    }
    for statuses, (message, hint) in refusals.items():
        if status in statuses:
            return RemoteFailureError(ConfigError(message, part=part, peer=peer, hint=hint), intact=True)
    said = message_of(text)
    failure = failure_from_text(said, part=part)
    if failure.error.message == said:
        failure.error.message = f"{call} was answered with status {status}: {said[:MAX_QUOTED]}"
    failure.error.peer = failure.error.peer or peer
    return RemoteFailureError(failure.error, intact=failure.intact)  # Its text has the message and the peer.
