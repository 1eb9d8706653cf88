"""The handshake by which a receiver joins a session, and both sides prove that they know the session's key.

A receiver dials the sender's listening socket and says hello with the session and its name. The sender admits exactly the
receivers of the topology, and then welcomes all of them. With a session key (`Topology.key`) the hello carries a fresh nonce and
an HMAC over session, name, lane and nonce, and the sender admits the receiver with an HMAC over the same under another label. The
key itself is never sent. A recorded hello is of no use in another session, whose key differs, nor in the same one, which a name
joins once. A recorded admission is of no use because the nonce is fresh.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .mac import proof, proves

_HELLO, _ADMISSION = "weightlane hello", "weightlane admission"
_NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class ReceiverHello:
    """A receiver's first message."""

    session: str
    name: str
    lane: str
    """Which of its connections to the sender this is."""
    nonce: str
    """Hexadecimal digits that were never sent before; empty in a session without a key."""

    @classmethod
    def of(cls, session: str, name: str, lane: str, key: bytes) -> ReceiverHello:
        """Make a new hello."""
        return cls(session, name, lane, secrets.token_hex(_NONCE_BYTES) if key else "")

    @classmethod
    def read(cls, message: Mapping[str, Any]) -> ReceiverHello:
        """Return the hello in a `message`. Its fields may be of any type, as an unknown peer sent them."""
        return cls(*(message.get(name) for name in cls.__slots__))  # type: ignore[arg-type]

    @property
    def _signed(self) -> tuple[str, ...]:
        return self.session, self.name, self.lane, self.nonce

    def message(self, key: bytes) -> dict[str, str]:
        """Return the message that a receiver sends; with a `key`, it proves that the receiver knows it."""
        message = {"session": self.session, "name": self.name, "lane": self.lane}
        return {**message, "nonce": self.nonce, "proof": proof(key, _HELLO, *self._signed)} if key else message

    def proven_by(self, message: Mapping[str, Any], key: bytes) -> bool:
        """Tell whether the receiver's `message` proves that it knows `key`."""
        return isinstance(self.nonce, str) and proves(key, message.get("proof"), _HELLO, *self._signed)

    def admission(self, key: bytes) -> dict[str, str]:
        """Return the sender's answer, which proves that the sender knows `key`."""
        return {"proof": proof(key, _ADMISSION, *self._signed)}

    def admitted_by(self, answer: Mapping[str, Any], key: bytes) -> bool:
        """Tell whether the sender's `answer` proves that it knows `key`."""
        return proves(key, answer.get("proof"), _ADMISSION, *self._signed)
