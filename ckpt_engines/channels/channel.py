"""Control connections between a sender and its receivers.

They are bounded by deadlines, interruptible, and quick to notice a death: either side's end closes its sockets,
whatever killed it, and the other side sees that at once. A receiver dials the sender's listening socket and says hello
with the session and its name; the sender lets in exactly the receivers of the topology and then welcomes all of them.
Messages are JSON behind a length, or frames of a fixed size.

With a session key (`Topology.key`) both sides prove that they know it, and never send it: the receiver's hello carries a
nonce of its own and an HMAC over session, name and nonce; the sender lets it in and answers with an HMAC over the same,
under another label, which nobody can have recorded because the nonce is fresh. A hello is of no use in another session,
whose key differs, nor twice in the same one, since a name joins once.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import select
import socket
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..deadline import Deadline
from ..errors import AddressInUseError, ConfigError, PeerLostError, ProtocolError, TransportError
from ..runtime.lifecycle import Lifecycle
from .mac import proof, proves

Address = Mapping[str, Any]
"""Where a half can be reached: JSON-representable, engine-specific, never pickled."""
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 64 * 1024
_MAX_DESCRIPTORS = 4
_BACKLOG = 1024
_MAX_STRANGERS = 128
"""Connections that may be waiting for their hello to be complete; a further one takes the place of the oldest."""
_DESCRIPTORS_PAUSE_S = 0.05
"""How long to wait for file descriptors when there are none: others of the process may give some back."""
_NONCE_BYTES = 16
_HELLO, _ADMISSION = "weightlane hello", "weightlane admission"


def listen_tcp(host: str, port: int = 0) -> socket.socket:
    """A socket that listens on `host` only; port 0 takes a free one.

    Raises `AddressInUseError` when the port is taken and `ConfigError` when `host` is not an address of this machine.
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


class Channel:
    """One connected, non-blocking stream socket. Owns the socket.

    One thread at a time sends, and one receives, which may be another. Any thread may poll `fileno` or call `hang_up` meanwhile.
    `close` comes when no call runs and nobody polls, which is what `Lifecycle` sees to.

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

    @property
    def life(self) -> Lifecycle:
        """Lifecycle of the half this channel belongs to."""
        return self._life

    @property
    def part(self) -> str:
        """Name of that half, for error messages."""
        return self._life.part

    def belong_to(self, life: Lifecycle) -> None:
        """From now on waits end when `life` is closed: that of the half which got this channel."""
        self._life = life

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

    def send_some(self, data: memoryview) -> int:
        """Send what there is room for right now and return how many bytes that was, perhaps 0. `PeerLostError`."""
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.lost() from error

    def receive_into(self, view: memoryview, deadline: Deadline, waiting_for: str) -> None:
        """Fill `view`, a writable view of bytes, without a copy in between. Raises as `receive`."""
        while view.nbytes:
            try:
                count = self._sock.recv_into(view)
            except BlockingIOError:
                self._life.wait_until({self.fileno(): select.POLLIN}, deadline, waiting_for, self.peer)
                continue
            except OSError as error:
                raise self.lost() from error
            if not count:
                raise self.lost()
            view = view[count:]

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

    def hang_up(self) -> None:
        """Let the peer know that nothing more comes. Whoever polls the socket here may go on."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


def dial(
    address: tuple[str, int] | str,
    life: Lifecycle,
    deadline: Deadline,
    *,
    session: str,
    name: str,
    peer: str,
    lane: str = "",
    key: bytes = b"",
) -> Channel:
    """Connect to a sender, at (host, port) or at the path of a Unix socket, and have it let this receiver in.

    Where there are several connections to one sender, each has a `lane` of its own. With a `key` (`Topology.key`) both sides
    prove that they know it. Whether everybody else came, too, is said by `welcomed`. Raises `PeerLostError` when nobody listens
    there, `ProtocolError` when the sender refuses or proves nothing, or `DeadlineExceededError`.
    """
    target: Any = address
    family = socket.AF_UNIX
    if not isinstance(address, str):
        try:
            family, _, _, _, target = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
        except (OSError, ValueError) as error:  # ValueError: not even the form of a name
            raise TransportError(f"cannot resolve {address[0]!r}: {error}.", part=life.part, peer=peer) from error
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        _connect(sock, target, life, peer, deadline)
        channel = Channel(sock, life, peer)
        _say_hello(channel, session, name, lane, key, deadline)
    except BaseException:
        sock.close()
        raise
    return channel


def welcome(channels: Iterable[Channel], deadline: Deadline) -> None:
    """[sender] Tell receivers that everybody is there."""
    for channel in channels:
        channel.send_json({}, deadline)


def welcomed(channel: Channel, deadline: Deadline) -> None:
    """[receiver] Wait until the sender has let everybody in. Raises as `dial`."""
    _answer(channel, deadline, "the sender's welcome, which needs every receiver")


def _say_hello(channel: Channel, session: str, name: str, lane: str, key: bytes, deadline: Deadline) -> None:
    """Introduce this receiver; with a `key`, prove that it knows it and have the sender prove the same."""
    hello = {"session": session, "name": name, "lane": lane}
    if not key:
        channel.send_json(hello, deadline)
        return
    nonce = secrets.token_hex(_NONCE_BYTES)
    said = (session, name, lane, nonce)
    channel.send_json({**hello, "nonce": nonce, "proof": proof(key, _HELLO, *said)}, deadline)
    admission = _answer(channel, deadline, "the sender to let it in")
    if not proves(key, admission.get("proof"), _ADMISSION, *said):
        raise ProtocolError(
            "what listens there does not know this session's key.",
            part=channel.part,
            peer=channel.peer,
            hint="Another program may have taken the sender's address; see docs/security.md.",
        )


def _answer(channel: Channel, deadline: Deadline, waiting_for: str) -> dict[str, Any]:
    """The sender's next message, unless it is a refusal."""
    message = channel.receive_json(deadline, waiting_for)
    if "refused" in message:
        raise ProtocolError(f"the sender refused: {message['refused']}.", part=channel.part, peer=channel.peer)
    return message


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
    listener: socket.socket,
    life: Lifecycle,
    session: str,
    names: Iterable[str],
    deadline: Deadline,
    *,
    lanes: Sequence[str] = ("",),
    key: bytes = b"",
) -> list[dict[str, Channel]]:
    """Wait until every receiver in `names` has said hello with this `session` on each of `lanes`, and let nobody else in.

    With a `key` (`Topology.key`) a receiver must prove that it knows it, and is shown that this side does. Returns for each
    lane the channels in the order of `names`. Raises `PeerLostError` when one that had connected is gone, or
    `DeadlineExceededError` naming those that never came.
    """
    lobby = _Lobby(listener, life, session, tuple(names), tuple(lanes), key)
    try:
        while missing := lobby.missing():
            lobby.step(deadline, f"{', '.join(missing)} to connect")
    except BaseException:
        for channel in lobby.joined.values():
            channel.close()
        raise
    finally:
        lobby.dismiss()
    return [{name: lobby.joined[lane, name] for name in lobby.names} for lane in lanes]


class _Lobby:
    """Connections from the listening socket on, until each is a joined receiver or refused."""

    def __init__(
        self,
        listener: socket.socket,
        life: Lifecycle,
        session: str,
        names: tuple[str, ...],
        lanes: tuple[str, ...],
        key: bytes,
    ) -> None:
        self._listener = listener
        self._life = life
        self._session = session
        self._key = key
        self._lanes = lanes
        self.names = names
        self.joined: dict[tuple[str, str], Channel] = {}
        """By lane and name."""
        self._strangers: dict[int, tuple[socket.socket, bytearray]] = {}
        self._hint = ""
        """Why the last one that knocked is not let in, if that is known."""
        listener.setblocking(False)

    def missing(self) -> list[str]:
        return [name for name in self.names if any((lane, name) not in self.joined for lane in self._lanes)]

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
                self._accept(deadline)
        deadline.check(waiting_for, part=self._life.part, hint=self._hint)  # who talks without end must not put it off

    def _accept(self, deadline: Deadline) -> None:
        self._hint = ""
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # the caller may have left again
            if error.errno in (errno.EMFILE, errno.ENFILE):  # the caller stays ready until some are free
                self._hint = "No file descriptor is left for a further connection: raise ulimit -n."
                self._life.wait({}, min(_DESCRIPTORS_PAUSE_S, deadline.remaining_s))
            return
        sock.setblocking(False)
        self._strangers[sock.fileno()] = (sock, bytearray())
        self._make_room()

    def _make_room(self) -> None:
        """Forget the stranger that has waited longest, so that silent ones cannot use up the file descriptors."""
        if len(self._strangers) > _MAX_STRANGERS + len(self._lanes) * len(self.names):
            oldest = next(iter(self._strangers))
            self._strangers.pop(oldest)[0].close()

    def _listen_to(self, descriptor: int) -> None:
        sock, heard = self._strangers[descriptor]
        try:
            chunk = sock.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        heard += chunk
        length = _LENGTH.unpack_from(heard)[0] if len(heard) >= _LENGTH.size else _MAX_MESSAGE_BYTES
        if chunk and length <= _MAX_MESSAGE_BYTES and len(heard) < _LENGTH.size + length:
            return
        del self._strangers[descriptor]
        hello = _decode(bytes(heard[_LENGTH.size :])) or {}
        name, lane, nonce = hello.get("name"), hello.get("lane"), hello.get("nonce", "")
        if hello.get("session") != self._session:
            self._refuse(sock, "it waits for another session")
        elif (
            not isinstance(name, str) or name not in self.names or not isinstance(lane, str) or lane not in self._lanes
        ):
            self._refuse(sock, "that is not the name of a receiver of this session")
        elif self._key and not (
            isinstance(nonce, str) and proves(self._key, hello.get("proof"), _HELLO, self._session, name, lane, nonce)
        ):
            self._refuse(sock, f"{name} did not prove that it knows this session's key")
        elif (lane, name) in self.joined:
            self._refuse(sock, f"{name!r} is connected already")
        elif self._admit(sock, name, lane, nonce):
            self.joined[lane, name] = Channel(sock, self._life, name)

    def _admit(self, sock: socket.socket, name: str, lane: str, nonce: str) -> bool:
        """Show the receiver that this side knows the key too; whether it is still there to see it."""
        if not self._key:
            return True
        answer = _encode({"proof": proof(self._key, _ADMISSION, self._session, name, lane, nonce)})
        try:  # its socket is empty, so there is room for it
            if sock.send(answer) == len(answer):
                return True
        except OSError:
            pass
        sock.close()
        return False

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
    except (ValueError, RecursionError):  # not JSON, or nested without end
        return None
    return message if isinstance(message, dict) else None
