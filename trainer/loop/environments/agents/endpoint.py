"""`Endpoint`: the HTTP server of a run that answers agents, each of which it knows by the key of its episode."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from weightlane.ckpt_engines import AddressInUseError, ClosedError

from .session import Session
from .wire import CallError, chat_request

_PART = "agent endpoint"
_MOST_BYTES = 64 << 20
"""Most bytes of a request: more than any conversation that a model can read."""
_REMEMBERED = 10_000
"""Most ended episodes whose keys are still known, so that a late call reads that its episode is over."""
_CLOSE_S = 5.0
"""Most seconds that the server may take to end."""


class Endpoint:
    """Serves ``/v1/chat/completions`` and ``/v1/models`` on the event loop of the run.

    Args:
        host: The address on which to listen.
        port: The port; 0 chooses a free one.
        model: The name under which the model is listed.
        temperature: The run's.
        ignores_sampling: See `chat_request`.

    Raises `AddressInUseError` if it cannot listen there.
    """

    def __init__(self, host: str, port: int, *, model: str, temperature: float, ignores_sampling: bool) -> None:
        self._model, self._temperature, self._ignores_sampling = model, temperature, ignores_sampling
        self._sessions: dict[bytes, Session] = {}
        """Sessions by a digest of their keys: how long a look-up takes says nothing of a key then."""
        self._ended: dict[bytes, None] = {}
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(1024)  # agents may call before the server runs
        except OSError as cause:
            listener.close()
            raise AddressInUseError(
                f"{host}:{port} cannot be listened on: {cause.strerror}.",
                part=_PART,
                hint="Set environment.options.host and port.",
            ) from cause
        shown = f"[{host}]" if ":" in host else host
        self.base_url = f"http://{shown}:{listener.getsockname()[1]}/v1"
        """The URL that agents get, as ``OPENAI_BASE_URL``."""
        routes = [
            Route("/v1/chat/completions", self._chat, methods=["POST"]),
            Route("/v1/models", self._models, methods=["GET"]),
        ]
        handlers: Any = {404: _unknown, 405: _unknown}
        self._server = Server(
            uvicorn.Config(
                Starlette(routes=routes, exception_handlers=handlers),
                lifespan="off",
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        self._listener = listener
        self._serving = asyncio.get_running_loop().create_task(self._server.serve([listener]), name="agent endpoint")

    @contextmanager
    def serving(self, session: Session) -> Iterator[str]:
        """Answer calls with the key that this context has. Raises `ClosedError` if the server has ended."""
        if self._serving.done():
            raise ClosedError("the server for agents has ended.", part=_PART)
        key = f"sk-{secrets.token_urlsafe(32)}"
        digest = sha256(key.encode()).digest()
        self._sessions[digest] = session
        try:
            yield key
        finally:
            session.close()
            del self._sessions[digest]
            self._ended[digest] = None
            if len(self._ended) > _REMEMBERED:
                del self._ended[next(iter(self._ended))]

    async def close(self) -> None:
        """End the server and its connections."""
        self._server.should_exit = True
        await asyncio.wait({self._serving}, timeout=_CLOSE_S)
        self._serving.cancel()
        await asyncio.gather(self._serving, return_exceptions=True)
        self._listener.close()

    async def _chat(self, request: Request) -> Response:
        try:
            session = self._session_of(request)
            asked = chat_request(await _body(request), self._temperature, ignores_sampling=self._ignores_sampling)
            answer = await session.chat(asked, _disconnect(request))
        except CallError as error:
            return _refused(error)
        if isinstance(answer, str):
            return Response(answer, media_type="text/event-stream")
        return JSONResponse(answer)

    async def _models(self, request: Request) -> Response:
        try:
            self._session_of(request)
        except CallError as error:
            return _refused(error)
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "weightlane"}
        return JSONResponse({"object": "list", "data": [model]})

    def _session_of(self, request: Request) -> Session:
        key = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        digest = sha256(key.encode()).digest()
        if session := self._sessions.get(digest):
            return session
        if digest in self._ended:
            raise CallError("the episode has ended.", status=410, code="episode_over")
        raise CallError("the API key is no episode's.", status=401, code="invalid_api_key")


class Server(uvicorn.Server):
    """A server that leaves signals to the program, which has more to end than HTTP."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield


async def _body(request: Request) -> object:
    """The body as JSON. Raises `CallError`."""
    received = bytearray()
    with suppress(ClientDisconnect):
        async for chunk in request.stream():
            received += chunk
            if len(received) > _MOST_BYTES:
                raise CallError(f"the body has more than {_MOST_BYTES} bytes.", status=413)
    try:
        body = json.loads(received)
        json.dumps(body, ensure_ascii=False).encode()  # refuses half a surrogate pair, as the tokenizer would
    except (ValueError, RecursionError) as cause:
        raise CallError(f"the body is no JSON: {cause}.") from cause
    return body


async def _disconnect(request: Request) -> None:
    """Return once the client has gone, before its request is answered."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _refused(error: CallError) -> Response:
    # The same call would be refused again: the SDK then does not repeat it.
    return JSONResponse(error.as_json(), error.status, {"x-should-retry": "false"})


async def _unknown(request: Request, _: Exception) -> Response:
    said = f"{request.method} {request.url.path} is not offered here, but /v1/chat/completions and /v1/models."
    return _refused(CallError(said, status=404, code="not_found"))
