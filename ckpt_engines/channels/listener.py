"""A sender's side of the handshake: listen, admit only the receivers of the session, and welcome them."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..deadline import Deadline
from ..errors import AddressInUseError, ConfigError
from ..runtime.lifecycle import Lifecycle
from .channel import Address, Channel
from .handshake import ReceiverHello
from .messages import LENGTH_BYTES, MAX_MESSAGE_BYTES, decode_text, encode_message, text_bytes

_BACKLOG = 1024
"""Connections that the kernel keeps until they are accepted; more than a run has receivers, so that none has to try again."""
_MAX_PENDING = 128
"""Accepted connections without a complete hello, beyond those of the receivers. A further connection closes the oldest, so that
silent ones cannot use up the process's file descriptors."""
_DESCRIPTORS_PAUSE_S = 0.05
"""How long to wait when the process has no file descriptor left: its other threads may close some."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket and the address that leads to it."""

    socket: socket.socket
    address: Address
    path: Path | None = None
    """Path of a Unix socket; None for TCP."""

    def close(self) -> None:
        """Stop listening. Idempotent; never raises: the next sender removes a path that could not be removed here."""
        self.socket.close()
        if self.path is not None:
            with contextlib.suppress(OSError):
                self.path.unlink()


def listen_tcp(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on `host` only; port 0 takes a free port.

    Raises `AddressInUseError` when the port is taken, and `ConfigError` when `host` is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"port {port} of {host} is taken.", part="listener", hint="Choose another port, or 0 for any free one."
            ) from error
        raise ConfigError(
            f"cannot listen on {host!r}: {error}.", part="listener", hint="Use an address of this machine."
        ) from error


def accept_receivers(
    listener: socket.socket,
    life: Lifecycle,
    session: str,
    names: Iterable[str],
    deadline: Deadline,
    *,
    lanes: Sequence[str] = ("",),
    key: bytes = b"",
) -> list[dict[str, Channel]]:
    """Wait until every receiver in `names` has said hello with this `session` on each of `lanes`. All others are refused.

    With a `key` (`Topology.key`) both sides prove that they know it. Returns for each lane the channels in the order of `names`.
    Raises `PeerLostError` when a receiver that had connected is gone, `DeadlineExceededError` naming those that did not connect,
    or `ClosedError`.
    """
    listener.setblocking(False)
    acceptor = _Acceptor(listener, life, session, tuple(names), tuple(lanes), key)
    try:
        while missing := acceptor.missing():
            acceptor.step(deadline, f"{', '.join(missing)} to connect")
    except BaseException:
        for channel in acceptor.joined.values():
            channel.close()
        raise
    finally:
        acceptor.drop_pending()
    return [{name: acceptor.joined[lane, name] for name in acceptor.names} for lane in lanes]


def welcome(channels: Iterable[Channel], deadline: Deadline) -> None:
    """Tell receivers that all of them have joined."""
    for channel in channels:
        channel.send_json({}, deadline)


@dataclass(slots=True)
class _Acceptor:
    """Accepts connections and hears all of them at once, until each is a joined receiver or refused."""

    listener: socket.socket
    life: Lifecycle
    session: str
    names: tuple[str, ...]
    lanes: tuple[str, ...]
    key: bytes
    joined: dict[tuple[str, str], Channel] = field(default_factory=dict)
    """Channels by lane and name."""
    pending: dict[int, tuple[socket.socket, bytearray]] = field(default_factory=dict)
    """Connections without a complete hello, and the bytes of it so far, by file descriptor; the oldest first."""
    hint: str = ""
    """Why the last connection could not be accepted, if that is known."""

    def missing(self) -> list[str]:
        return [name for name in self.names if any((lane, name) not in self.joined for lane in self.lanes)]

    def drop_pending(self) -> None:
        for sock, _ in self.pending.values():
            sock.close()

    def step(self, deadline: Deadline, waiting_for: str) -> None:
        joined = {channel.fileno(): channel for channel in self.joined.values()}
        descriptors = (self.listener.fileno(), *self.pending, *joined)
        for descriptor in self.life.wait_until(dict.fromkeys(descriptors, select.POLLIN), deadline, waiting_for):
            if descriptor in joined:  # a receiver sends nothing before it is welcomed, so this is its end
                raise joined[descriptor].lost(f"while waiting for {waiting_for}")
            if descriptor in self.pending:
                self._hear(descriptor)
            else:
                self._accept(deadline)
        # A connection that sends without end keeps the wait from reaching the deadline.
        deadline.check(waiting_for, part=self.life.part, hint=self.hint)

    def _accept(self, deadline: Deadline) -> None:
        self.hint = ""
        try:
            sock, _ = self.listener.accept()
        except OSError as error:  # the caller may have left again
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the connection stays in the backlog until there are some
                self.hint = "No file descriptor is left for a further connection: raise ulimit -n."
                self.life.wait({}, min(_DESCRIPTORS_PAUSE_S, deadline.remaining_s))
            return
        sock.setblocking(False)
        self.pending[sock.fileno()] = (sock, bytearray())
        if len(self.pending) > _MAX_PENDING + len(self.lanes) * len(self.names):
            self.pending.pop(next(iter(self.pending)))[0].close()

    def _hear(self, descriptor: int) -> None:
        sock, heard = self.pending[descriptor]
        try:
            chunk = sock.recv(MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        heard += chunk
        length = text_bytes(heard) if len(heard) >= LENGTH_BYTES else MAX_MESSAGE_BYTES
        if chunk and length <= MAX_MESSAGE_BYTES and len(heard) < LENGTH_BYTES + length:
            return
        del self.pending[descriptor]
        self._answer(sock, decode_text(bytes(heard[LENGTH_BYTES:])) or {})

    def _answer(self, sock: socket.socket, message: dict[str, Any]) -> None:
        """Let the receiver that sent `message` over `sock` join, or refuse it."""
        hello = ReceiverHello.read(message)
        if hello.session != self.session:
            refusal = "it waits for another session"
        elif hello.name not in self.names or hello.lane not in self.lanes:
            refusal = "that is not the name of a receiver of this session"
        elif self.key and not hello.proven_by(message, self.key):
            refusal = f"{hello.name} did not prove that it knows this session's key"
        elif (hello.lane, hello.name) in self.joined:
            refusal = f"{hello.name!r} is connected already"
        else:
            if not self.key or _sent(sock, hello.admission(self.key)):
                self.joined[hello.lane, hello.name] = Channel(sock, self.life, hello.name)
            else:
                sock.close()
            return
        _sent(sock, {"refused": refusal})
        sock.close()


def _sent(sock: socket.socket, message: dict[str, str]) -> bool:
    """Send a short message at once, and tell whether the connection took all of it: its buffer is empty so far."""
    data = encode_message(message)
    try:
        return sock.send(data) == len(data)
    except OSError:
        return False
