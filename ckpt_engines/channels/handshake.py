"""The handshake of every connection: both ends prove that they know a key, and derive the keys of this connection from it.

Three messages, each a JSON object behind its length:

    1. [listener]  a nonce, and the seconds of silence after which the other host counts as gone
    2. [dialer]    its `Hello`, a nonce of its own, and an HMAC over all of these
    3. [listener]  an HMAC over the same values under another label, or the reason why it refuses the dialer

The key itself is never sent: it is the run's secret for the hub, and `Topology.key` for senders and receivers. Both nonces are
fresh, so a recorded message is of no use on any other connection. The keys that sign the frames of either direction derive from
the key, the nonces and the hello, so a program in the middle that forwards the handshake can forge no frame.
"""

from __future__ import annotations

import json
import math
import secrets
import socket
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

from .channel import LENGTH, Keys, proof, proves

MOST_BYTES = 4096
"""Longest message of a handshake, and so the most memory that an unauthenticated peer can make this process hold. A hello has a
few hundred bytes."""
_NONCE_BYTES = 16
_LONGEST_SILENCE_S = 1 << 15
"""Most seconds that Linux takes for keep-alive probes (MAX_TCP_KEEPIDLE)."""


class Hello(NamedTuple):
    """The session that a dialer wants to join. All fields are empty for a participant that dials the hub."""

    session: str = ""
    name: str = ""
    """Name of the dialer in the session's topology."""
    lane: str = ""
    """Tells several connections of one dialer apart."""


class Challenge(NamedTuple):
    """The listener's first message."""

    nonce: str
    silence_s: int
    """Seconds of silence after which the other host counts as gone; 0 leaves that to the kernel."""

    @classmethod
    def new(cls, silence_s: float) -> Self:
        """Make a challenge that was never sent before."""
        return cls(secrets.token_hex(_NONCE_BYTES), math.ceil(silence_s))

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> Self | None:
        """Return the challenge in the `message` of an unauthenticated peer, or None when it contains no valid challenge."""
        nonce, silence_s = message.get("nonce"), message.get("silence_s")
        if isinstance(nonce, str) and type(silence_s) is int and 0 <= silence_s < _LONGEST_SILENCE_S:
            return cls(nonce, silence_s)
        return None


class Agreement:
    """The values that both ends of one connection share after the dialer's message. `key` is the secret that both must know."""

    def __init__(self, key: bytes, challenge: Challenge, hello: Hello, nonce: str) -> None:
        self.hello = hello
        self._nonce = nonce
        parts = (challenge.nonce, str(challenge.silence_s), nonce, *hello)
        self._shared = bytes.fromhex(proof(key, "weightlane connection", *parts))

    @classmethod
    def dialled(cls, key: bytes, challenge: Challenge, hello: Hello) -> Self:
        """[dialer] Make the agreement with a fresh nonce."""
        return cls(key, challenge, hello, secrets.token_hex(_NONCE_BYTES))

    @classmethod
    def heard(cls, key: bytes, challenge: Challenge, message: Mapping[str, Any]) -> Self:
        """[listener] Make the agreement from a dialer's `message`. Fields that are not strings count as empty."""
        fields = (message.get(field) for field in (*Hello._fields, "nonce"))
        *hello, nonce = (field if isinstance(field, str) else "" for field in fields)
        return cls(key, challenge, Hello(*hello), nonce)

    def message(self) -> dict[str, str]:
        """[dialer] Return the message for the listener."""
        return {**self.hello._asdict(), "nonce": self._nonce, "proof": proof(self._shared, "join")}

    def proven_by(self, message: Mapping[str, Any]) -> bool:
        """[listener] Tell whether the dialer's `message` proves that it knows the key."""
        return proves(self._shared, message.get("proof"), "join")

    def welcome(self) -> dict[str, str]:
        """[listener] Return the answer, which proves that the listener knows the key."""
        return {"proof": proof(self._shared, "welcome")}

    def welcomed_by(self, answer: Mapping[str, Any]) -> bool:
        """[dialer] Tell whether the listener's `answer` proves that it knows the key."""
        return proves(self._shared, answer.get("proof"), "welcome")

    def keys(self, *, listens: bool) -> Keys:
        """Return the keys of one end's frames."""
        down, up = (bytes.fromhex(proof(self._shared, direction)) for direction in ("down", "up"))
        return Keys(down, up) if listens else Keys(up, down)


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Return a message of a handshake as the bytes to send."""
    text = json.dumps(message).encode()
    return LENGTH.pack(len(text)) + text


def text_bytes(head: bytes | bytearray) -> int | None:
    """Return the length of a message's text, which `head`, its first bytes, states; None if it exceeds `MOST_BYTES`."""
    (length,) = LENGTH.unpack_from(head)
    return length if length <= MOST_BYTES else None


def configure(sock: socket.socket, silence_s: int) -> None:
    """Have the kernel send at once, and end the connection after the other host was silent for `silence_s` seconds.

    The kernel sends keep-alive probes while the connection is idle, and limits how long sent bytes may stay unacknowledged. A
    busy process does not count as gone, unless it reads nothing for that long while more bytes wait than its socket holds.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not silence_s:
        return
    probes = 3
    between_s = max(1, silence_s // (2 * probes))
    for level, option, value in (
        (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
        (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, max(1, silence_s - probes * between_s)),
        (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, between_s),
        (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, probes),
        (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * silence_s),
    ):
        sock.setsockopt(level, option, value)
