"""Control connections between a sender and its receivers.

They are bounded by deadlines, interruptible, and quick to notice a death: either side's end closes its sockets,
whatever killed it, and the other side sees that at once. A receiver dials the sender's listening socket and says hello
with the session and its name; the sender lets in exactly the receivers of the topology and then welcomes all of them.
Messages are JSON behind a length, or frames of a fixed size.
"""

from __future__ import annotations

import contextlib
import errno
import json
import select
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ._lifecycle import Lifecycle
from .deadline import Deadline
from .errors import AddressInUseError, ConfigError, PeerLostError, ProtocolError, TransportError

_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 64 * 1024
_MAX_DESCRIPTORS = 4
_BACKLOG = 1024


def listen_tcp(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on `host` only; port 0 takes a free one.

    Raises `AddressInUseError` when the port is taken and `ConfigError` when `host` is not an address of this machine.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUseError(
                f"port {port} of {host} is taken.", part="listener", hint="Choose another port, or 0 for any free one."
            ) from error
        raise ConfigError(
            f"cannot listen on {host!r}: {error}.", part="listener", hint="Use an address of this machine."
        ) from error


class Channel:
    """One connected, non-blocking stream socket. Owns the socket; every call belongs to one thread.

    Args:
        sock: The connected socket.
        life: Lifecycle of the half this channel belongs to.
        peer: Name of the other side for error messages.
    """

    def __init__(self, sock: socket.socket, life: Lifecycle, peer: str) -> None:
        sock.setblocking(False)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._life = life
        self.peer = peer

    def fileno(self) -> int:
        """The socket's file descriptor, for `Lifecycle.wait`."""
        return self._sock.fileno()

    def send(self, data: bytes, deadline: Deadline, descriptors: Sequence[int] = ()) -> None:
        """Send all of `data`, with file descriptors attached to its first byte (Unix sockets only)."""
        rest = memoryview(data)
        while rest:
            try:
                if descriptors:
                    sent = socket.send_fds(self._sock, [rest], descriptors)
                    descriptors = ()
                else:
                    sent = self._sock.send(rest)
            except BlockingIOError:
                self._life.wait_until({self.fileno(): select.POLLOUT}, deadline, "room to send to it", self.peer)
            except OSError as error:
                raise self.lost() from error
            else:
                rest = rest[sent:]

    def receive(self, nbytes: int, deadline: Deadline, waiting_for: str, descriptors: list[int] | None = None) -> bytes:
        """Exactly `nbytes` bytes; descriptors that come with them are appended to `descriptors` (Unix sockets only).

        Raises `PeerLostError` when the peer is gone and `DeadlineExceededError`.
        """
        data = bytearray()
        while len(data) < nbytes:
            try:
                if descriptors is None:
                    chunk = self._sock.recv(nbytes - len(data))
                else:
                    chunk, attached, _, _ = socket.recv_fds(
                        self._sock, nbytes - len(data), _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                    )
                    descriptors.extend(attached)
            except BlockingIOError:
                self._life.wait_until({self.fileno(): select.POLLIN}, deadline, waiting_for, self.peer)
                continue
            except OSError as error:
                raise self.lost() from error
            if not chunk:
                raise self.lost()
            data += chunk
        return bytes(data)

    def send_json(self, message: Mapping[str, Any], deadline: Deadline) -> None:
        """Send one JSON object."""
        self.send(_encode(message), deadline)

    def receive_json(self, deadline: Deadline, waiting_for: str) -> dict[str, Any]:
        """The next JSON object; `ProtocolError` for anything else."""
        (length,) = _LENGTH.unpack(self.receive(_LENGTH.size, deadline, waiting_for))
        if length > _MAX_MESSAGE_BYTES:
            raise ProtocolError(f"a message of {length} bytes is too long.", part=self._life.part, peer=self.peer)
        message = _decode(self.receive(length, deadline, waiting_for))
        if message is None:
            raise ProtocolError("a message is not a JSON object.", part=self._life.part, peer=self.peer)
        return message

    def lost(self, circumstance: str = "") -> PeerLostError:
        """The error for a peer that is gone."""
        return PeerLostError(
            f"the peer closed its connection or died{circumstance and ' '}{circumstance}.",
            part=self._life.part,
            peer=self.peer,
            hint="Look at the peer's own log for the reason.",
        )

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def dial(
    address: tuple[str, int] | str, life: Lifecycle, deadline: Deadline, *, session: str, name: str, peer: str
) -> tuple[Channel, dict[str, Any]]:
    """Connect to a sender, at (host, port) or at the path of a Unix socket, and wait for its welcome.

    Returns the channel and the sender's welcome message. Raises `PeerLostError` when nobody listens there,
    `ProtocolError` when the sender refuses, or `DeadlineExceededError`.
    """
    target: Any = address
    family = socket.AF_UNIX
    if not isinstance(address, str):
        try:
            family, _, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise TransportError(f"cannot resolve {address[0]!r}: {error}.", part=life.part, peer=peer) from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _connect(sock, target, life, peer, deadline)
        channel = Channel(sock, life, peer)
        channel.send_json({"session": session, "name": name}, deadline)
        welcome = channel.receive_json(deadline, "the sender's welcome, which needs every receiver")
    except BaseException:
        sock.close()
        raise
    if "refused" in welcome:
        channel.close()
        raise ProtocolError(f"the sender refused: {welcome['refused']}.", part=life.part, peer=peer)
    return channel, welcome


def _connect(sock: socket.socket, target: Any, life: Lifecycle, peer: str, deadline: Deadline) -> None:
    sock.setblocking(False)
    while True:
        code = sock.connect_ex(target)
        if code == errno.EAGAIN:  # a Unix socket whose backlog is full
            life.wait({}, min(0.01, deadline.remaining_s))
            deadline.check("the sender to accept the connection", part=life.part, peer=peer)
            continue
        if code == errno.EINPROGRESS:
            life.wait_until({sock.fileno(): select.POLLOUT}, deadline, "the connection to the sender", peer)
            code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise PeerLostError(
                f"cannot connect to {target}: {errno.errorcode.get(code, code)}.",
                part=life.part,
                peer=peer,
                hint="Check that the sender is alive and that the address can be reached from here.",
            )
        return


def accept_receivers(
    listener: socket.socket, life: Lifecycle, session: str, names: Iterable[str], deadline: Deadline
) -> dict[str, Channel]:
    """Wait until every receiver in `names` has said hello with this `session`, and let nobody else in.

    Returns the channels in the order of `names`. Raises `PeerLostError` when one that had connected is gone, or
    `DeadlineExceededError` naming those that never came.
    """
    lobby = _Lobby(listener, life, session, tuple(names))
    try:
        while missing := lobby.missing():
            lobby.step(deadline, f"{', '.join(missing)} to connect")
    except BaseException:
        for channel in lobby.joined.values():
            channel.close()
        raise
    finally:
        lobby.dismiss()
    return {name: lobby.joined[name] for name in lobby.names}


class _Lobby:
    """Connections from the listening socket on, until each is a joined receiver or refused."""

    def __init__(self, listener: socket.socket, life: Lifecycle, session: str, names: tuple[str, ...]) -> None:
        self._listener = listener
        self._life = life
        self._session = session
        self.names = names
        self.joined: dict[str, Channel] = {}
        self._strangers: dict[int, tuple[socket.socket, bytearray]] = {}
        listener.setblocking(False)

    def missing(self) -> list[str]:
        return [name for name in self.names if name not in self.joined]

    def dismiss(self) -> None:
        for sock, _ in self._strangers.values():
            sock.close()

    def step(self, deadline: Deadline, waiting_for: str) -> None:
        joined = {channel.fileno(): channel for channel in self.joined.values()}
        descriptors = (self._listener.fileno(), *self._strangers, *joined)
        ready = self._life.wait_until(dict.fromkeys(descriptors, select.POLLIN), deadline, waiting_for)
        for descriptor in ready:
            if descriptor in joined:  # a receiver is silent until it is welcomed, so this is its end
                raise joined[descriptor].lost(f"while waiting for {waiting_for}")
            if descriptor in self._strangers:
                self._listen_to(descriptor)
            else:
                with contextlib.suppress(OSError):  # the caller may have left again
                    sock, _ = self._listener.accept()
                    sock.setblocking(False)
                    self._strangers[sock.fileno()] = (sock, bytearray())

    def _listen_to(self, descriptor: int) -> None:
        sock, heard = self._strangers[descriptor]
        try:
            chunk = sock.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        heard += chunk
        length = _LENGTH.unpack_from(heard)[0] if len(heard) >= _LENGTH.size else 0
        if chunk and length <= _MAX_MESSAGE_BYTES and len(heard) < _LENGTH.size + max(1, length):
            return
        del self._strangers[descriptor]
        hello = _decode(bytes(heard[_LENGTH.size :])) or {}
        name = hello.get("name")
        if hello.get("session") != self._session:
            self._refuse(sock, "it waits for another session")
        elif name not in self.names:
            self._refuse(sock, f"{name!r} is not a receiver of this session")
        elif name in self.joined:
            self._refuse(sock, f"{name!r} is connected already")
        else:
            self.joined[name] = Channel(sock, self._life, name)

    @staticmethod
    def _refuse(sock: socket.socket, reason: str) -> None:
        with contextlib.suppress(OSError):
            sock.send(_encode({"refused": reason}))
        sock.close()


def _encode(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


def _decode(body: bytes) -> dict[str, Any] | None:
    try:
        message = json.loads(body)
    except ValueError:
        return None
    return message if isinstance(message, dict) else None
