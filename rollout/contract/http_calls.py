"""`HttpCalls`: HTTP calls to the server of a replica, whose failures are typed errors."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn, Self

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
_CONNECT_S = 30.0
"""Most seconds until a server accepts a connection: a live one does at once."""
_MAX_ANSWER_BYTES = 1 << 20
"""Most bytes of an answer that are read at once: a stranger's server may send any number."""
MAX_QUOTED = 2000
"""Most characters of an answer that an error quotes."""


class HttpCalls:
    """Calls to one server, from one event loop. A `with` block closes all connections.

    Args:
        url: Address of the server without a path, such as ``http://127.0.0.1:30000``.
        token: Bearer token of every call; empty for none.
        part: Name of the replica in errors.
        kind: The server in errors, such as "a vLLM server".

    Raises:
        ConfigError: `token` cannot be sent in a header.
    """

    def __init__(self, url: str, token: str, part: str, kind: str) -> None:
        if not token.isprintable():
            raise ConfigError(
                "the token has a line break, or another character that no header has.",
                part=part,
                hint="Strip the text that you read it from.",
            )
        self.url, self.part, self._kind = url.rstrip("/"), part, kind
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def get(self, path: str, limit_s: float, **query: str) -> dict[str, Any]:
        """The JSON object at `path`."""
        async with self._answer("GET", path, None, limit_s, query) as answer:
            return self.parsed(path, await _text_of(answer))

    async def post(self, path: str, body: Mapping[str, Any], limit_s: float, **query: str) -> str:
        """Post `body` to `path`. Returns the answer, and raises `ConfigError` with the server's message if it refuses."""
        async with self._answer("POST", path, body, limit_s, query) as answer:
            return await _text_of(answer)

    async def answers(self, path: str, limit_s: float) -> bool:
        """Whether `path` can be read."""
        with suppress(WorkerDiedError, DeadlineExceededError):
            async with self._answer("GET", path, None, limit_s):
                return True
        return False

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[bytes, None]:
        """Post `body` to `path`, and yield the events of the answer; several may arrive at once."""
        pending = b""
        async with self._answer("POST", path, body, None) as answer:
            async for data in answer.content.iter_any():
                *events, pending = (pending + data).split(b"\n\n")
                for event in events:
                    yield event.removeprefix(b"data: ")

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        session, self._session, self._closed = self._session, None, True
        if session is not None:
            await session.close()

    def refuse(self, call: str, status: int, text: str) -> NoReturn:
        """Raise the error of an answer to `call` that has another status than 200."""
        kind = ConfigError if status in _REFUSED else WorkerDiedError
        said = f"{call} was answered with status {status}: {message_of(text)[:MAX_QUOTED]}"
        raise kind(said, part=self.part, peer=self.url)

    def parsed(self, path: str, text: str) -> dict[str, Any]:
        """The JSON object `text`, which is the answer to `path`. Raises `ProtocolError` for any other text."""
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(text), dict):
                return found
        raise ProtocolError(
            f"the answer to /{path} is not {self._kind}'s: {text[:80]!r}.",
            part=self.part,
            peer=self.url,
            hint="Check the address.",
        )

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        limit_s: float | None,
        query: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        try:
            import aiohttp  # noqa: PLC0415 - optional
        except ImportError as cause:
            hint = "Install it: pip install 'weightlane[server]'."
            raise ConfigError(f"driving {self._kind} needs aiohttp.", part=self.part, hint=hint) from cause
        if self._closed:
            raise ClosedError("the replica is not running.", part=self.part)
        if self._session is None:
            # A connection for each call: no request keeps a control call waiting, and none is sent while the server closes an
            # idle connection. No proxy from the environment: calls stay in the private network.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(headers=self._headers, connector=connector, trust_env=False)
        # 0 would mean no limit.
        total = None if limit_s is None else max(0.001, limit_s)
        timeout = aiohttp.ClientTimeout(total=total, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(
                method, f"{self.url}/{path}", params=query, json=body, timeout=timeout, allow_redirects=False
            ) as answer:
                if answer.status != _OK:
                    self.refuse(f"{method} /{path}", answer.status, await _text_of(answer))
                yield answer
        except aiohttp.InvalidURL as cause:
            raise ConfigError(f"{self.url!r} is not the address of a server.", part=self.part) from cause
        except WeightlaneError:
            raise
        except TimeoutError as cause:
            connecting = isinstance(cause, aiohttp.ConnectionTimeoutError)
            within_s = _CONNECT_S if limit_s is None or connecting else limit_s
            raise DeadlineExceededError(
                f"no answer to {method} /{path} within {within_s:g} s.",
                part=self.part,
                peer=self.url,
                hint="Look into the server's log for what it waits for.",
            ) from cause
        except (aiohttp.ClientError, OSError) as cause:
            raise WorkerDiedError(
                f"the server does not answer {method} /{path}: {cause or type(cause).__name__}.",
                part=self.part,
                peer=self.url,
                hint="Start it, or check the address; its log has the cause if it has ended.",
            ) from cause


async def _text_of(answer: aiohttp.ClientResponse) -> str:
    data = b""
    async for piece in answer.content.iter_any():
        data += piece
        if len(data) > _MAX_ANSWER_BYTES:
            break
    return data[:_MAX_ANSWER_BYTES].decode(errors="replace")


def message_of(text: str) -> str:
    """The message of a server's error: in ``error`` or ``detail``, alone or as ``message`` of an object, or in ``message``."""
    try:
        parsed = json.loads(text)
        said = parsed.get("error") or parsed.get("detail") or parsed["message"]
        return str(said["message"] if isinstance(said, dict) else said)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        return text
