"""Message authentication: only holders of a run's secret can sign messages.

Signatures are HMAC-SHA256 (RFC 2104). A separate key is derived from the run's secret for every purpose, and for each direction
of every control connection. The lengths of the parts are signed, too, so two different lists of parts never give the same
signature. Secrets and keys are never sent.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct

from ..errors import ConfigError

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
