"""`ServerCalls`: HTTP calls to a vLLM server, each with a deadline, whose failures are typed errors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from weightlane.ckpt_engines import ConfigError, Deadline, ProtocolError, WorkerDiedError

from ..commit.remote_failure import RemoteFailureError, failure_from_text

if TYPE_CHECKING:
    import aiohttp

_MAX_ANSWER_BYTES = 1 << 20
"""Most bytes of an answer that are read: a stranger's server may send any number."""
_MAX_QUOTED = 2000
"""Most characters of an answer that an error quotes."""
_OK = 200
_UNAUTHORIZED = (401, 403)
_NOT_FOUND = (404, 405)


class ServerCalls:
    """Calls to one server, inside an ``async with`` block. Each raises a `RemoteFailureError` if it fails.

    Args:
        url: Address of the server without a path, e.g. ``http://127.0.0.1:8000``.
        token: Bearer token of every call; empty for none.
        part: Name of the server in errors.
    """

    def __init__(self, url: str, token: str, part: str) -> None:
        self._url = url
        self._part = part
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        try:
            import aiohttp  # noqa: PLC0415 - optional
        except ImportError as cause:
            raise ConfigError(
                "driving a vLLM server over HTTP needs aiohttp.",
                part=self._part,
                hint="Install it: pip install 'weightlane[server]'.",
            ) from cause
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            # One connection per call: vLLM's server closes a connection after an error without announcing it, and a call that
            # is sent meanwhile is lost.
            connector=aiohttp.TCPConnector(force_close=True),
            # No proxy from the environment: control calls stay in the private network.
            trust_env=False,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def get(self, path: str, deadline: Deadline, **query: str) -> dict[str, Any]:
        """The JSON object at `path`."""
        return await self._call("GET", path, deadline, query, None)

    async def post(self, path: str, deadline: Deadline, body: Mapping[str, Any] | None = None, **query: str) -> None:
        """Post `body` to `path`."""
        await self._call("POST", path, deadline, query, body or {})

    async def _call(
        self, method: str, path: str, deadline: Deadline, query: Mapping[str, str], body: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        import aiohttp  # noqa: PLC0415 - as above

        assert self._session is not None
        timeout = aiohttp.ClientTimeout(total=max(0.001, deadline.remaining_s))  # 0 would mean no limit.
        try:
            async with self._session.request(
                method, f"{self._url}/{path}", params=query, json=body, timeout=timeout, allow_redirects=False
            ) as answer:
                text = (await answer.content.read(_MAX_ANSWER_BYTES)).decode(errors="replace")
                status = answer.status
        except TimeoutError as cause:
            waited = deadline.error(f"the answer to {method} /{path}", part=self._part, peer=self._url)
            raise RemoteFailureError(waited, intact=False) from cause
        except aiohttp.InvalidURL as cause:
            wrong = ConfigError(f"{self._url!r} is not the address of a server.", part=self._part)
            raise RemoteFailureError(wrong, intact=True) from cause
        except (aiohttp.ClientError, OSError) as cause:
            gone = WorkerDiedError(
                f"the server does not answer {method} /{path}: {cause or type(cause).__name__}.",
                part=self._part,
                peer=self._url,
                hint="Start it, or check the address; its log has the cause if it ended.",
            )
            raise RemoteFailureError(gone, intact=False) from cause
        if status != _OK:
            raise refusal(f"{method} /{path}", status, text, part=self._part, peer=self._url)
        return self._parsed(path, text)

    def _parsed(self, path: str, text: str) -> dict[str, Any]:
        with suppress(ValueError, RecursionError):
            if isinstance(parsed := json.loads(text), dict):
                return parsed
        error = ProtocolError(
            f"the answer to /{path} is not a vLLM server's: {text[:80]!r}.",
            part=self._part,
            peer=self._url,
            hint="Check the address.",
        )
        raise RemoteFailureError(error, intact=False)


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
    said = _message_of(text)
    failure = failure_from_text(said, part=part)
    if failure.error.message == said:
        failure.error.message = f"{call} was answered with status {status}: {said[:_MAX_QUOTED]}"
    failure.error.peer = failure.error.peer or peer
    return RemoteFailureError(failure.error, intact=failure.intact)  # Its text has the message and the peer.


def _message_of(text: str) -> str:
    """The message in an error of vLLM or FastAPI: ``{"error": {"message": ...}}``, ``{"error": ...}``, ``{"detail": ...}``."""
    try:
        parsed = json.loads(text)
        said = parsed.get("error", parsed.get("detail"))
        return str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, AttributeError, KeyError, RecursionError):
        return text
