"""`SglangCalls`: HTTP calls to an SGLang server, whose failures are typed errors."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    DeadlineExceededError,
    ProtocolError,
    WeightlaneError,
    WorkerDiedError,
)

if TYPE_CHECKING:
    import aiohttp

_OK = 200
_REFUSED = range(400, 500)
_MAX_QUOTED = 2000
"""Most characters of an answer that an error quotes."""
_CONNECT_S = 30.0
"""Most seconds until a server accepts a connection: a live one does at once."""
_EVENT = b"data: {"


class SglangCalls:
    """Calls to one server, from one event loop.

    Args:
        url: Address of the server without a path, such as ``http://127.0.0.1:30000``.
        token: SGLang's ``--api-key``; empty for none.
        part: Name of the replica in errors.
    """

    def __init__(self, url: str, token: str, part: str) -> None:
        self.url, self._part = url.rstrip("/"), part
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def get(self, path: str, limit_s: float) -> dict[str, Any]:
        """The JSON object at `path`."""
        async with self._answer("GET", path, None, limit_s) as answer:
            return self._parsed(path, await answer.text())

    async def post(self, path: str, body: Mapping[str, Any], limit_s: float) -> None:
        """Post `body` to `path`. Raises `ConfigError` with the server's message if it refuses."""
        async with self._answer("POST", path, body, limit_s) as answer:
            await answer.read()

    async def answers(self, path: str, limit_s: float) -> bool:
        """Whether `path` can be read: ``/health`` has the server compute a token (``entrypoints/http_server.py``)."""
        try:
            async with self._answer("GET", path, None, limit_s):
                return True
        except (WorkerDiedError, DeadlineExceededError):
            return False

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """Post `body` to ``/generate``, and yield the chunks of the answer; several may have become one."""
        pending = b""
        async with self._answer("POST", "generate", {**body, "stream": True}, None) as answer:
            async for data in answer.content.iter_any():
                *events, pending = (pending + data).split(b"\n\n")
                for event in events:
                    if event.startswith(_EVENT):
                        yield self._parsed("generate", event[len(_EVENT) - 1 :].decode())

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        session, self._session, self._closed = self._session, None, True
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def _answer(
        self, method: str, path: str, body: Mapping[str, Any] | None, limit_s: float | None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        aiohttp = self._library()
        if self._closed:
            raise ClosedError("the replica is not running.", part=self._part)
        if self._session is None:
            # A connection for each call: no request keeps a control call waiting, and none is sent while the server closes an
            # idle connection. No proxy from the environment.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector, trust_env=False)
        # 0 would mean no limit.
        total = None if limit_s is None else max(0.001, limit_s)
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(
                method, f"{self.url}/{path}", json=body, timeout=timeout, allow_redirects=False
            ) as answer:
                if answer.status != _OK:
                    raise self._refusal(path, answer.status, await answer.text())
                yield answer
        except aiohttp.InvalidURL as cause:
            raise ConfigError(f"{self.url!r} is not the address of a server.", part=self._part) from cause
        except WeightlaneError:
            raise
        except TimeoutError as cause:
            raise DeadlineExceededError(
                f"no answer to /{path} within {limit_s} s.",
                part=self._part,
                peer=self.url,
                hint="Look into the server's log for what it waits for.",
            ) from cause
        except (aiohttp.ClientError, OSError) as cause:
            raise WorkerDiedError(
                f"the server does not answer /{path}: {cause or type(cause).__name__}.",
                part=self._part,
                peer=self.url,
                hint="Its log has the cause if it has ended.",
            ) from cause

    def _library(self) -> Any:
        try:
            import aiohttp  # noqa: PLC0415 - optional
        except ImportError as cause:
            raise ConfigError(
                "driving an SGLang server needs aiohttp.",
                part=self._part,
                hint="Install it: pip install 'weightlane[server]'.",
            ) from cause
        return aiohttp

    def _refusal(self, path: str, status: int, text: str) -> WeightlaneError:
        said = f"/{path} was answered with status {status}: {message_of(text)[:_MAX_QUOTED]}"
        if status in _REFUSED:
            return ConfigError(said, part=self._part, peer=self.url)
        return WorkerDiedError(said, part=self._part, peer=self.url)

    def _parsed(self, path: str, text: str) -> dict[str, Any]:
        try:
            if isinstance(parsed := json.loads(text), dict):
                return parsed
        except (ValueError, RecursionError):
            pass
        raise ProtocolError(f"the answer to /{path} is not SGLang's: {text[:80]!r}.", part=self._part, peer=self.url)


def message_of(text: str) -> str:
    """The message in an answer that says what went wrong: ``{"error": {"message": ...}}``, or ``{"message": ...}``."""
    try:
        parsed = json.loads(text)
        return str((parsed.get("error") or parsed)["message"])
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return text
