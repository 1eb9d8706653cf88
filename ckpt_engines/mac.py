"""Message authentication: who holds a run's secret can sign, everybody else is refused.

HMAC-SHA256 (RFC 2104) over the *context* and the body. The context says what the bytes are for and where they belong, such
as the name of an inbox or of a key: a message that was signed for one place is worth nothing in another. Lengths are part
of what is signed, so no two pairs of context and body look alike. Secrets and keys are never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from .errors import ConfigError, ProtocolError

SECRET_BYTES = 32
_PART = "authentication"
_MAC_CHARACTERS = 64
"""A MAC travels as hexadecimal digits, so that a signed text stays a text."""


def new_secret() -> str:
    """A fresh secret from the operating system's generator: 64 hexadecimal digits."""
    return secrets.token_hex(SECRET_BYTES)


def sign(secret: str, context: str, body: bytes) -> bytes:
    """`body` in an envelope that `verify` opens with the same `secret` and `context`."""
    return _mac(secret, "message", context, body).hexdigest().encode() + body


def verify(secret: str, context: str, envelope: bytes) -> bytes:
    """The body of an envelope that `sign` made; `ProtocolError` for anything else."""
    mac, body = envelope[:_MAC_CHARACTERS], envelope[_MAC_CHARACTERS:]
    if not hmac.compare_digest(_mac(secret, "message", context, body).hexdigest().encode(), mac):
        raise ProtocolError(
            f"what came for {context} was not signed with this run's secret.",
            part=_PART,
            hint="Something that is not part of this run can reach its ports; see docs/security.md.",
        )
    return body


def derive_key(secret: str, purpose: str) -> bytes:
    """The key, 32 bytes, of one `purpose`: knowing it tells nothing of `secret` or of the keys of other purposes."""
    return _mac(secret, "key", purpose, b"").digest()


def proof(key: bytes, *parts: str) -> str:
    """What only a holder of `key` can compute from `parts`, as 64 hexadecimal digits."""
    return _digest(key, *(part.encode(errors="surrogatepass") for part in parts)).hexdigest()


def proves(key: bytes, claim: object, *parts: str) -> bool:
    """Whether `claim`, whatever a peer sent, is the `proof` of `parts`. Takes the same time for every claim."""
    given = claim.encode(errors="replace") if isinstance(claim, str) else b""
    return hmac.compare_digest(proof(key, *parts).encode(), given)


def _mac(secret: str, use: str, context: str, body: bytes) -> hmac.HMAC:
    if not secret:
        raise ConfigError("the run's secret is empty.", part=_PART, hint="Make one with new_secret().")
    return _digest(secret.encode(errors="surrogatepass"), use.encode(), context.encode(errors="surrogatepass"), body)


def _digest(key: bytes, *parts: bytes) -> hmac.HMAC:
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        mac.update(struct.pack("<Q", len(part)))
        mac.update(part)
    return mac
