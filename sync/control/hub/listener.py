"""`ControlListener`: accepts connections to the hub, and admits those whose other end knows the run's secret."""

from __future__ import annotations

import contextlib
import logging
import resource
import socket
import time
from collections.abc import Callable

from weightlane.ckpt_engines.toolkit import listen_tcp

from .handshake import ANSWER_BYTES, Keys, admit, configure, greeting, refusal
from .io_loop import watch

_log = logging.getLogger(__name__)
_MOST_PENDING = 8192
"""How many connections may be in their handshake, beyond which the oldest is dropped; a thousand may come at once."""
_PENDING_S = 30.0
"""How long a handshake may take, in seconds, before the arrival of another connection drops it."""


class ControlListener:
    """Listens for participants, on the thread of the process's `IoLoop`.

    The other arguments, and the errors, are those of `ControlHub`.

    Args:
        on_admitted: Called on the loop's thread with the socket and the keys of every admitted connection.
        on_close: Called there once, after `close`.
    """

    def __init__(
        self,
        host: str,
        port: int,
        secret: str,
        silence_s: float,
        on_admitted: Callable[[socket.socket, Keys], None],
        on_close: Callable[[], None],
    ) -> None:
        self._secret, self._silence_s = secret, silence_s
        self._on_admitted, self._on_close = on_admitted, on_close
        self._pending: dict[int, _Handshake] = {}
        """Connections in their handshake, the oldest first."""
        self.closed = False
        self._sock = listen_tcp(host, port)
        self._spare: socket.socket | None = socket.socket()
        """Given up when no descriptor is left, so that a participant can be told."""
        self.port: int = self._sock.getsockname()[1]
        self._sock.setblocking(False)
        self._loop = watch(self._sock, self._accept)

    def close(self) -> None:
        """Stop listening, and drop connections in their handshake. Idempotent, never waits.

        Takes no lock, since the garbage collector may call it anywhere: the loop notices, and does the rest.
        """
        self.closed = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def _accept(self, _: int) -> None:
        """[loop's thread] Accept one connection, or end. Raises nothing: the loop would close the listener."""
        if self.closed:
            if self._spare is not None:
                self._spare.close()
            for handshake in self._pending.values():
                self._loop.close(handshake.sock)
            self._on_close()
            self._loop.close(self._sock)
            return
        self._drop_old()
        try:
            sock, _address = self._sock.accept()
        except OSError as error:
            if not isinstance(error, BlockingIOError) and not _raise_descriptor_limit():
                self._refuse(error)
            return
        handshake = _Handshake(sock, self._silence_s, self._finish)
        self._pending[sock.fileno()] = handshake
        handshake.begin()

    def _drop_old(self) -> None:
        """Drop connections whose handshake takes too long, and the oldest when there are too many."""
        now = time.monotonic()
        while self._pending:
            descriptor, oldest = next(iter(self._pending.items()))
            if len(self._pending) < _MOST_PENDING and now - oldest.since < _PENDING_S:
                return
            del self._pending[descriptor]
            self._loop.close(oldest.sock)

    def _refuse(self, error: OSError) -> None:
        """Use the spare descriptor to tell a participant that there is none for it.

        Another thread may take that descriptor first; the participant then waits.
        """
        _log.warning("a participant was turned away: %s. Raise the limit of open files (ulimit -n).", error)
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        with contextlib.suppress(OSError):
            sock, _ = self._sock.accept()
            with sock:
                sock.sendall(refusal())
        with contextlib.suppress(OSError):
            self._spare = socket.socket()

    def _finish(self, handshake: _Handshake) -> None:
        """[loop's thread] Admit a connection whose other end has answered, or drop it."""
        sock, answer = handshake.sock, handshake.answer
        self._pending.pop(sock.fileno(), None)
        admitted = admit(self._secret, handshake.nonce, answer) if len(answer) == ANSWER_BYTES else None
        if admitted is None or self.closed:
            self._loop.close(sock)
            return
        keys, welcome = admitted
        try:
            sock.send(welcome)  # its buffer is empty, so there is room
            configure(sock, self._silence_s)
        except OSError:
            self._loop.close(sock)
            return
        self._on_admitted(sock, keys)


class _Handshake:
    """A connection whose other end has not proved yet that it knows the secret."""

    def __init__(self, sock: socket.socket, silence_s: float, on_end: Callable[[_Handshake], None]) -> None:
        self.sock = sock
        self.since = time.monotonic()
        self.nonce, self._greeting = greeting(silence_s)
        self.answer = b""
        self._on_end = on_end

    def begin(self) -> None:
        self.sock.setblocking(False)
        with contextlib.suppress(OSError):
            self.sock.send(self._greeting)
        watch(self.sock, self._read)

    def _read(self, _: int) -> None:
        try:
            chunk = self.sock.recv(ANSWER_BYTES - len(self.answer))
        except BlockingIOError:
            return  # the event was for an earlier socket with this descriptor
        except OSError:
            chunk = b""
        self.answer += chunk
        if not chunk or len(self.answer) == ANSWER_BYTES:
            self._on_end(self)


def _raise_descriptor_limit() -> bool:
    """Raise this process's limit of open files as far as is allowed. Returns whether that gave any."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True
