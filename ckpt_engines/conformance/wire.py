"""How the suite talks to its processes: JSON lines over a Unix socket, and errors with what a check asks of them."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any

from .. import errors
from ..errors import WeightlaneError, error_from_wire

_CHUNK_BYTES = 1 << 16


class UntypedError(AssertionError):
    """An engine raised something that is not one of weightlane's errors."""


class Line:
    """One end of a connection that carries JSON objects, a line each."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._heard = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send one object; a peer that is gone is noticed by the next `receive`."""
        with contextlib.suppress(OSError):
            self._sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """The next object, or None when the peer is gone; `TimeoutError` after `timeout_s` seconds."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while b"\n" not in self._heard:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._sock], [], [], left)[0]:
                raise TimeoutError
            try:
                chunk = self._sock.recv(_CHUNK_BYTES)
            except OSError:
                chunk = b""
            if not chunk:
                return None
            self._heard += chunk
        line, _, rest = bytes(self._heard).partition(b"\n")
        self._heard = bytearray(rest)
        message: dict[str, Any] = json.loads(line)
        return message

    def fileno(self) -> int:
        """The socket's file descriptor."""
        return self._sock.fileno()

    @property
    def buffered(self) -> bool:
        """Whether `receive` has an object already, whatever the socket says."""
        return b"\n" in self._heard

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


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
