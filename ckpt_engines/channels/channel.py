"""`Connection`: signed frames over a stream socket, the wire format of every connection that weightlane opens itself.

A frame has a kind, a number, a name and a payload. It carries an HMAC-SHA256 (RFC 2104) over its contents and over the count of
the frames before it, under a key of this connection and direction. So a forged, changed or repeated frame, one from another
connection, and the frame after a missing one are refused. The payload is signed by its digest, so one payload for many peers is
hashed once. A separate key is derived from the run's secret for every purpose. The lengths of signed parts are signed, too, so
two different lists of parts never give the same signature. Secrets and keys are never sent.

`Channel`: one connection between a sender and a receiver, bounded by deadlines and ended by a close or a death. When a process
ends, for whatever reason, its sockets are closed, and the other side sees that at once. Messages are JSON objects in signed
frames, or plain bytes of a size that both sides know.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import secrets
import select
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeVar

from ..errors import ConfigError, PeerLostError, ProtocolError
from ..waits import Deadline, Lifecycle

SECRET_BYTES = 32
TAG_BYTES = 32
_PART = "authentication"


def new_secret() -> str:
    """Return a new secret from the operating system's generator: 64 hexadecimal digits."""
    return secrets.token_hex(SECRET_BYTES)


def tag(key: bytes, number: int, head: bytes, payload_digest: bytes) -> bytes:
    """Return the signature, 32 bytes, of message `number` of a connection, over its head and its payload's SHA-256."""
    return hmac.digest(key, struct.pack("<QI", number, len(head)) + head + payload_digest, "sha256")


def derive_key(secret: str, purpose: str) -> bytes:
    """Return the key, 32 bytes, for one `purpose`. It reveals neither `secret` nor the keys for other purposes.

    Raises `ConfigError` when `secret` is empty.
    """
    if not secret:
        raise ConfigError("the run's secret is empty.", part=_PART, hint="Make one with new_secret().")
    return _digest(secret.encode(errors="surrogatepass"), b"key", purpose.encode(errors="surrogatepass"), b"").digest()


def proof(key: bytes, *parts: str) -> str:
    """Return the signature of `parts`, which only a holder of `key` can compute, as 64 hexadecimal digits."""
    return _digest(key, *(part.encode(errors="surrogatepass") for part in parts)).hexdigest()


def proves(key: bytes, claim: object, *parts: str) -> bool:
    """Tell whether `claim`, any object that a peer sent, is the `proof` of `parts`. Takes the same time for every claim."""
    given = claim.encode(errors="replace") if isinstance(claim, str) else b""
    return hmac.compare_digest(proof(key, *parts).encode(), given)


def _digest(key: bytes, *parts: bytes) -> hmac.HMAC:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(struct.pack("<Q", len(part)))
        mac.update(part)
    return mac


LENGTH = struct.Struct("<I")
"""The first bytes of a frame: the number of bytes that follow."""
_HEAD = struct.Struct("<BIH")
"""Kind, number, and length of the name."""
LEAST_BYTES = TAG_BYTES + _HEAD.size
"""Length of a frame without name and payload."""


class Frame(NamedTuple):
    """One message on a connection."""

    kind: int
    number: int
    name: str
    payload: bytes


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys that sign the frames that one end of a connection sends, and the frames that it receives."""

    sending: bytes
    receiving: bytes


def payload_digest(payload: bytes) -> bytes:
    """Return the digest that stands for a payload in the signature of its frame: SHA-256."""
    return hashlib.sha256(payload).digest()


class Connection:
    """One end of a connection: a connected socket, which it owns and makes non-blocking, and the keys of the handshake.

    Subclasses send and receive: `Channel` waits until a deadline, and the hub's `ControlConnection` never waits. `peer` is the
    name of the other end for error messages.
    """

    most_bytes: ClassVar[int]
    """Longest frame, checked before any memory is taken for it."""

    def __init__(self, sock: socket.socket, keys: Keys, peer: str) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.keys = keys
        self.peer = peer
        self._sent = self._received = 0
        """Number of frames sent, and number of frames received."""

    @property
    def part(self) -> str:
        """Name of this end for error messages."""
        return "control connection"

    def fileno(self) -> int:
        """Return the socket's file descriptor."""
        return self.socket.fileno()

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def hang_up(self) -> None:
        """Tell the peer that nothing more will be sent. Threads that poll the socket here are not disturbed."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_WR)

    def _signed(self, frame: Frame, digest: bytes | None = None) -> bytes:
        """Return the bytes to send before the payload of the next frame. `digest` is the payload's, if it is known.

        Raises `ProtocolError` if the frame is too long.
        """
        name = frame.name.encode()
        head = _HEAD.pack(frame.kind, frame.number, len(name)) + name
        nbytes = TAG_BYTES + len(head) + len(frame.payload)
        if nbytes > self.most_bytes:
            raise self._broken(f"{frame.name or 'a message'}: {nbytes} bytes are too many for one frame.")
        signature = tag(self.keys.sending, self._sent, head, digest or payload_digest(frame.payload))
        self._sent += 1
        return LENGTH.pack(nbytes) + signature + head

    def _length(self, data: bytes | bytearray, offset: int = 0) -> int:
        """Return how many bytes follow the length at `offset`. Raises `ProtocolError` when no frame is that long."""
        (nbytes,) = LENGTH.unpack_from(data, offset)
        if not LEAST_BYTES <= nbytes <= self.most_bytes:
            raise self._broken(f"a frame of {nbytes} bytes arrived, which is too long or too short.")
        return int(nbytes)

    def _verified(self, data: bytes) -> Frame:
        """Return the frame in `data`, the next frame without its length.

        Raises `ProtocolError` when the frame is not signed with the key of this connection.
        """
        kind, number, length = _HEAD.unpack_from(data, TAG_BYTES)
        end = LEAST_BYTES + length
        head, payload = data[TAG_BYTES:end], data[end:]
        expected = tag(self.keys.receiving, self._received, head, payload_digest(payload))
        if not secrets.compare_digest(expected, data[:TAG_BYTES]):
            raise self._broken("a frame arrived that was not signed with the key of this connection.")
        self._received += 1
        return Frame(kind, number, head[_HEAD.size :].decode(errors="replace"), payload)

    def _broken(self, message: str) -> ProtocolError:
        return ProtocolError(message, part=self.part, peer=self.peer)


def decode_text(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object in `text`, or None when it holds anything else."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or nested without end
        return None
    return message if isinstance(message, dict) else None


Address = Mapping[str, Any]
"""JSON data by which peers reach a half or a link. Its maker chooses the keys; it is never pickled."""
_MAX_DESCRIPTORS = 4
"""Most file descriptors that `Channel.receive_descriptors` takes at once; the kernel closes any others. An engine passes one."""
_ROOM = "room to send to it"
_T = TypeVar("_T")


class Channel(Connection):
    """A connection whose calls wait until a deadline.

    One thread at a time may send, and one at a time may receive; they may be different threads. Any thread may poll `fileno` or
    call `hang_up` meanwhile. `close` may be called only when no other call runs and no thread polls; `Lifecycle` takes care of
    that. `life` is that of the half that uses the channel: closing it ends every wait of the channel with `ClosedError`.
    """

    most_bytes = LEAST_BYTES + 64 * 1024
    """Longest frame; real messages have a few kB."""

    def __init__(self, sock: socket.socket, keys: Keys, life: Lifecycle, peer: str) -> None:
        super().__init__(sock, keys, peer)
        self.life = life

    @property
    def part(self) -> str:
        """Name of the half that uses the channel, for error messages."""
        return self.life.part

    def belong_to(self, life: Lifecycle) -> None:
        """Make closing `life` end the channel's waits from now on. A half that gets the channel passes its own."""
        self.life = life

    def send(self, data: bytes, deadline: Deadline) -> None:
        """Send all of `data`. Raises `PeerLostError`, `DeadlineExceededError` or `ClosedError`."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._when_ready(select.POLLOUT, deadline, _ROOM, functools.partial(self.socket.send, rest)) :]

    def send_some(self, data: memoryview) -> int:
        """Send as much of `data` as the socket has room for now, and return the number of bytes sent, perhaps 0.

        Raises `PeerLostError`.
        """
        try:
            return self.socket.send(data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise self.lost() from error

    def receive(self, nbytes: int, deadline: Deadline, waiting_for: str) -> bytes:
        """Return the next `nbytes` bytes. Raises as `send`."""
        data = bytearray(nbytes)
        self.receive_into(memoryview(data), deadline, waiting_for)
        return bytes(data)

    def receive_into(self, view: memoryview, deadline: Deadline, waiting_for: str) -> None:
        """Fill `view`, writable bytes, with the next bytes, without a copy in between. Raises as `send`."""
        while view.nbytes:
            receive = functools.partial(self.socket.recv_into, view)
            count = self._when_ready(select.POLLIN, deadline, waiting_for, receive)
            if not count:
                raise self.lost()
            view = view[count:]

    def send_descriptors(self, descriptors: Sequence[int], deadline: Deadline) -> None:
        """Pass file descriptors, one to four, over a Unix socket; they stay open here. Raises as `send`."""
        self._when_ready(select.POLLOUT, deadline, _ROOM, lambda: socket.send_fds(self.socket, [b"\0"], descriptors))

    def receive_descriptors(self, deadline: Deadline, waiting_for: str) -> list[int]:
        """Return the file descriptors that `send_descriptors` passes; the caller owns them. Raises as `send`."""
        flag, descriptors, _, _ = self._when_ready(
            select.POLLIN,
            deadline,
            waiting_for,
            lambda: socket.recv_fds(self.socket, 1, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC),
        )
        if not flag:
            raise self.lost()
        return descriptors

    def send_json(self, message: Mapping[str, Any], deadline: Deadline) -> None:
        """Send one JSON object. Raises as `send`."""
        text = json.dumps(message).encode()
        self.send(self._signed(Frame(0, 0, "", text)) + text, deadline)

    def receive_json(self, deadline: Deadline, waiting_for: str) -> dict[str, Any]:
        """Return the next JSON object.

        Raises as `send`, or `ProtocolError` when the message is not signed by the peer, is not a JSON object, or is too long.
        """
        nbytes = self._length(self.receive(LENGTH.size, deadline, waiting_for))
        message = decode_text(self._verified(self.receive(nbytes, deadline, waiting_for)).payload)
        if message is None:
            raise ProtocolError("a message is not a JSON object.", part=self.part, peer=self.peer)
        return message

    def _when_ready(self, event: int, deadline: Deadline, waiting_for: str, operation: Callable[[], _T]) -> _T:
        """Return the result of `operation` on the socket. While it would block, wait for `event` and try again."""
        while True:
            try:
                return operation()
            except BlockingIOError:
                self.life.wait_until({self.fileno(): event}, deadline, waiting_for, self.peer)
            except OSError as error:
                raise self.lost() from error

    def lost(self, circumstance: str = "") -> PeerLostError:
        """Return the error to raise when the peer is gone. `circumstance` may say when that was, e.g. ``"while ..."``."""
        return PeerLostError(
            f"the peer closed its connection or died{circumstance and ' '}{circumstance}.",
            part=self.part,
            peer=self.peer,
            hint="Look at the peer's own log for the reason.",
        )
