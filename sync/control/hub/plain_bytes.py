"""Plain data as bytes: JSON, compressed if it is long.

Placements and lists of tensors are repetitive: two thousand entries compress to a tenth. The hub of a run sends the same ones to
every rank.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from weightlane.ckpt_engines import ProtocolError

_LONG_BYTES = 4 << 10
"""Length from which text is compressed. Compressing a shorter one takes longer than sending it."""
_LEVEL = 1
_ZLIB_START = b"\x78"
"""The first byte of zlib's format (RFC 1950). JSON never begins with it."""
MOST_BYTES = 4 << 30
"""Limit for the length of decompressed text, which bounds the memory that a member can make another one use."""


def to_bytes(value: Any) -> bytes:
    """Encode the JSON-representable `value`."""
    return shortened(json.dumps(value).encode())


def shortened(text: bytes) -> bytes:
    """Compress JSON text if it is long."""
    return text if len(text) < _LONG_BYTES else zlib.compress(text, _LEVEL)


def full_text(data: bytes, what: str) -> bytes:
    """The inverse of `shortened`. Raises `ProtocolError`, naming `what`, for invalid or too long data."""
    if not data.startswith(_ZLIB_START):
        return data
    decompressor = zlib.decompressobj()
    try:
        text = decompressor.decompress(data, MOST_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"{what} is not compressed JSON: {error}.", part="control plane") from None
    if not decompressor.eof:
        raise ProtocolError(f"{what} is cut off, or too long.", part="control plane")
    return text


def from_bytes(data: bytes, what: str) -> Any:
    """The inverse of `to_bytes`. Raises `ProtocolError`, naming `what`, for invalid data."""
    try:
        return json.loads(full_text(data, what))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError(f"{what} is not JSON: {error}.", part="control plane") from None
