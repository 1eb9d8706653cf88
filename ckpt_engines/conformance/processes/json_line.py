"""How the conformance suite and the benchmark talk to the processes they start: JSON objects over a Unix socket, a line each."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any

_CHUNK_BYTES = 1 << 16


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
