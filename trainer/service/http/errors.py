"""Typed errors as HTTP answers, and the limits of a request's body."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from weightlane.ckpt_engines import ClosedError, ConfigError, ProtocolError, WeightlaneError

from ..errors import BusyError, TooLargeError, UnknownError
from ..wire.bodies import decompressed

_log = logging.getLogger("weightlane.service.http")
RETRY_S = 1
"""Value of the header ``Retry-After``: seconds after which a client should try again."""
BUSY = 429
"""The HTTP status of a `BusyError`."""


_STATUS: dict[type[WeightlaneError], int] = {
    BusyError: BUSY,
    TooLargeError: 413,
    ClosedError: 410,
    UnknownError: 404,
    ConfigError: 422,
    ProtocolError: 422,
}
"""HTTP statuses by class of errors. The first class that fits counts."""


def problem(status: int, message: str, **headers: str) -> Response:
    """An error answer in the form that the SDK shows."""
    return JSONResponse({"detail": message, "error": message}, status, headers or None)


async def answered(call: Callable[[], Awaitable[Response]]) -> Response:
    """The answer of `call`, or an error answer: 4xx for every error that the client can correct."""
    try:
        return await call()
    except ClientDisconnect:
        return problem(499, "the client has gone.")
    except WeightlaneError as error:
        status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)
        return problem(status, str(error), **({"Retry-After": str(RETRY_S)} if status == BUSY else {}))
    except Exception as error:  # noqa: BLE001 - the log has the rest
        _log.exception("a request failed")
        return problem(500, f"{type(error).__name__}: {error}")


async def read_body(request: Request, most_bytes: int) -> bytes:
    """The body, decompressed. Raises `TooLargeError` as soon as it is too large, and the errors of `decompressed`."""
    return decompressed(await receive(request, most_bytes), encoding_of(request), most_bytes)


async def receive(request: Request, most_bytes: int) -> bytes:
    """The body as it was sent. Reading stops as soon as it is larger than allowed."""
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        chunks.append(chunk)
        if size > most_bytes:
            break
    return b"".join(chunks)


def encoding_of(request: Request) -> str:
    """The body's content encoding, as the client declares it."""
    return request.headers.get("content-encoding", "")
