"""The listening side of connections: `Listener` admits those whose other end knows the key, and refuses all others."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import logging
import resource
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import AddressInUseError, ConfigError
from .channel import LENGTH, Address, Keys, decode_text
from .handshake import MOST_BYTES, Agreement, Challenge, Hello, configure, encode_message, text_bytes
from .io_loop import unwatch, watch

_log = logging.getLogger(__name__)
_BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted: more than a run has receivers, so that no receiver must retry."""
_PENDING_S = 30.0
"""Age, in seconds, at which an unfinished handshake is dropped when another connection arrives."""
_DESCRIPTORS_PAUSE_S = 0.01
"""How long the loop sleeps when no file descriptor is left: other threads may close some."""


class Admission(NamedTuple):
    """The rules of a listener. Both functions are called on the loop's thread."""

    key: bytes
    """The key that both ends prove to know."""
    refusal: Callable[[Hello, bool], str]
    """Returns the reason to refuse a dialer, given its hello and whether it has proven the key; empty to admit it."""
    on_admitted: Callable[[socket.socket, Keys, Hello], None]
    """Takes an admitted connection."""
    most_pending: int
    """How many connections may be in their handshake. One more drops the oldest, so that silent dialers cannot use up the
    process's file descriptors."""
    silence_s: float = 0.0
    """See `Challenge.silence_s`."""
    tells_when_full: bool = False
    """Whether a dialer is refused at once when no file descriptor is left; otherwise it waits for one."""


class _Pending(NamedTuple):
    """A connection whose other end has not yet proven that it knows the key."""

    sock: socket.socket
    challenge: Challenge
    since: float
    heard: bytearray


class Listener:
    """A listening socket, which it owns, and its `address`, JSON data for dialers. `admit` starts to accept connections.

    `path` is that of a Unix socket; None for TCP.
    """

    def __init__(self, sock: socket.socket, address: Address, path: Path | None = None) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.address = address
        self.path = path
        self.closed = False
        self.hint = ""
        """Why the last connection could not be accepted, if that is known."""
        self._admission: Admission | None = None
        self._pending: dict[int, _Pending] = {}
        """Connections in their handshake by descriptor, the oldest first."""
        self._spare: socket.socket | None = None
        """An unused socket. It is closed when no descriptor is left, so that a dialer can be accepted and refused with its
        descriptor."""
        self._on_close: Callable[[], None] = lambda: None

    def admit(self, admission: Admission, on_close: Callable[[], None] = lambda: None) -> None:
        """Accept connections from now on, on the thread of `io_loop`, which calls `on_close` there once after `close`."""
        self._admission, self._on_close = admission, on_close
        if admission.tells_when_full:
            self._spare = socket.socket()
        watch(self.socket, lambda _: self._accept(admission))

    def close(self) -> None:
        """Stop listening, and drop connections in their handshake. Idempotent; never waits or raises.

        Takes no lock, since the garbage collector may call it anywhere: the loop's thread notices the close and does the rest.
        The next sender removes a path that could not be removed here.
        """
        self.closed = True
        with contextlib.suppress(OSError):
            if self.path is not None:
                self.path.unlink()
        with contextlib.suppress(OSError):
            if self._admission is None:
                self.socket.close()
            else:
                self.socket.shutdown(socket.SHUT_RDWR)

    def _accept(self, admission: Admission) -> None:
        """[loop's thread] Accept one connection, or end."""
        if self.closed:
            for pending in list(self._pending.values()):
                self._drop(pending)
            if self._spare is not None:
                self._spare.close()
            self._on_close()
            unwatch(self.socket)
            self.socket.close()
            return
        self.hint = ""
        self._drop_old(admission.most_pending)
        try:
            sock, _ = self.socket.accept()
        except OSError as error:  # the dialer may have left again
            if error.errno in (errno.EMFILE, errno.ENFILE) and not _raise_descriptor_limit():
                self._refuse(error)
            return
        sock.setblocking(False)
        pending = _Pending(sock, Challenge.new(admission.silence_s), time.monotonic(), bytearray())
        self._pending[sock.fileno()] = pending
        _send(sock, pending.challenge._asdict())
        watch(sock, lambda _: self._hear(pending, admission))

    def _drop(self, pending: _Pending) -> None:
        del self._pending[pending.sock.fileno()]
        unwatch(pending.sock)
        pending.sock.close()

    def _drop_old(self, most_pending: int) -> None:
        """Drop connections whose handshake takes too long, and the oldest when there are too many."""
        end = time.monotonic() - _PENDING_S
        while self._pending:
            oldest = next(iter(self._pending.values()))
            if len(self._pending) < most_pending and oldest.since > end:
                return
            self._drop(oldest)

    def _refuse(self, error: OSError) -> None:
        """Refuse a dialer for lack of a descriptor, with the spare descriptor. Without a spare, it stays in the backlog."""
        self.hint = "No file descriptor is left for a further connection: raise ulimit -n."
        if self._spare is None:
            time.sleep(_DESCRIPTORS_PAUSE_S)
        else:
            _log.warning("a connection was turned away: %s. %s", error, self.hint)
            self._spare.close()
            self._spare = None
            with contextlib.suppress(OSError):  # another thread may take the descriptor first
                sock, _ = self.socket.accept()
                with sock:
                    _send(sock, {"full": True})
        if self._admission is not None and self._admission.tells_when_full:
            with contextlib.suppress(OSError):
                self._spare = socket.socket()

    def _hear(self, pending: _Pending, admission: Admission) -> None:
        """[loop's thread] Read what a dialer sent, and answer a complete message."""
        sock, heard = pending.sock, pending.heard
        try:
            chunk = sock.recv(LENGTH.size + MOST_BYTES - len(heard))
        except BlockingIOError:
            return  # the event was for an earlier socket with this descriptor
        except OSError:
            chunk = b""
        heard += chunk
        if chunk and len(heard) < LENGTH.size:
            return
        length = text_bytes(heard) if len(heard) >= LENGTH.size else None
        if chunk and length is not None and len(heard) < LENGTH.size + length:
            return
        message = {} if length is None else decode_text(bytes(heard[LENGTH.size :])) or {}
        agreement = Agreement.heard(admission.key, pending.challenge, message)
        refusal = admission.refusal(agreement.hello, agreement.proven_by(message))
        if refusal or not _send(sock, agreement.welcome()):
            _send(sock, {"refused": refusal})
            self._drop(pending)
            return
        del self._pending[sock.fileno()]
        unwatch(sock)
        try:
            configure(sock, pending.challenge.silence_s)
        except OSError:  # the dialer is gone
            sock.close()
            return
        admission.on_admitted(sock, agreement.keys(listens=True), agreement.hello)


def one_address(host: str) -> str:
    """Return `host`, an address or a name, which is not looked up. Public in `toolkit`, for the options of engines.

    Raises `ValueError` when it stands for all of this machine's addresses, as 0.0.0.0, 0 and :: do, or can be no host's name.
    """
    address = None
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)[0][4][0]
        address = ipaddress.ip_address(found)
    except UnicodeError:
        raise ValueError("can be no host's name: a part between its dots is empty or too long") from None
    except OSError:  # a name
        pass
    if not host or (address and (getattr(address, "ipv4_mapped", None) or address).is_unspecified):
        raise ValueError("is a wildcard, on which no peer can connect; name one address of this machine")
    return host


def listen_tcp(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on `host` only; port 0 takes a free port.

    Raises `AddressInUseError` when the port is taken, and `ConfigError` when `host` is not one address of this machine, or `port`
    is not the number of one.
    """
    try:
        found = socket.getaddrinfo(one_address(host), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, *_, address = found[0]
        one_address(str(address[0]))
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, ValueError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"port {port} of {host} is taken.", part="listener", hint="Choose another port, or 0 for any free one."
            ) from error
        raise ConfigError(
            f"cannot listen on {host!r}: {error}.", part="listener", hint="Use an address of this machine."
        ) from error


def _send(sock: socket.socket, message: dict[str, Any]) -> bool:
    """Send a short message without waiting, and tell whether the socket, whose send buffer is still empty, took all of it."""
    data = encode_message(message)
    try:
        return sock.send(data) == len(data)
    except OSError:
        return False


def _raise_descriptor_limit() -> bool:
    """Raise this process's limit of open files to the hard limit. Returns whether that raised it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True
