"""A Unix socket that carries JSON objects, one per line, between a program and the processes that it starts."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from typing import Any

_CHUNK_BYTES = 1 << 16


class JsonSocket:
    """One end of a stream socket that carries JSON objects, one per line."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()

    def send(self, message: dict[str, Any]) -> None:
        """Send one object. Never raises for a peer that is gone: the next `receive` reports it."""
        with contextlib.suppress(OSError):
            self._sock.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, timeout_s: float | None = None) -> dict[str, Any] | None:
        """Return the next object, or None when the peer is gone. Raises `TimeoutError` after `timeout_s` seconds."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while not self.buffered:
            left = None if end is None else max(0.0, end - time.monotonic())
            if not select.select([self._sock], [], [], left)[0]:
                raise TimeoutError
            try:
                chunk = self._sock.recv(_CHUNK_BYTES)
            except OSError:
                chunk = b""
            if not chunk:
                return None
            self._buffer += chunk
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        message: dict[str, Any] = json.loads(line)
        return message

    def fileno(self) -> int:
        """The socket's file descriptor."""
        return self._sock.fileno()

    @property
    def buffered(self) -> bool:
        """Whether `receive` has a complete object already, so that `select` on the socket need not report one."""
        return b"\n" in self._buffer

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()
