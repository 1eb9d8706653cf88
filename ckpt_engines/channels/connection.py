"""`Connection`: signed frames over a stream socket, the wire format of every connection that weightlane opens itself.

A frame has a kind, a number, a name and a payload. It carries an HMAC-SHA256 over its contents and over the count of the frames
before it, under a key of this connection and direction. So a forged, changed or repeated frame, one from another connection, and
the frame after a missing one are refused. The payload is signed by its digest, so one payload for many peers is hashed once.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import socket
import struct
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from ..errors import ProtocolError
from .authentication import TAG_BYTES, tag

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
