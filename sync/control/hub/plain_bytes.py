"""Plain data as bytes: JSON, compressed where it is long.

Placements and lists of tensors repeat themselves: two thousand of them take a tenth of the room, and the hub of a run sends the
same ones to every rank.
"""

from __future__ import annotations

import json
import zlib
from typing import Any

from weightlane.ckpt_engines import ProtocolError

_LONG_BYTES = 4 << 10
"""What is shorter goes as it is: compressing it takes longer than sending it."""
_LEVEL = 1
_MARK = b"\x78"
"""How zlib's format begins, and JSON never does (RFC 1950)."""
MOST_BYTES = 4 << 30
"""What bytes may stand for at most; a bound on what a member can make another one hold in memory."""


def to_bytes(value: Any) -> bytes:
    """`value`, which JSON can represent, as bytes."""
    return shortened(json.dumps(value).encode())


def shortened(text: bytes) -> bytes:
    """JSON that is long, compressed."""
    return text if len(text) < _LONG_BYTES else zlib.compress(text, _LEVEL)


def full_text(data: bytes, what: str) -> bytes:
    """The JSON that `shortened` was given; `ProtocolError`, about `what`, for anything that it did not make."""
    if not data.startswith(_MARK):
        return data
    unpacking = zlib.decompressobj()
    try:
        text = unpacking.decompress(data, MOST_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"{what} is not compressed JSON: {error}.", part="control plane") from None
    if not unpacking.eof:
        raise ProtocolError(f"{what} is cut off, or too long.", part="control plane")
    return text


def from_bytes(data: bytes, what: str) -> Any:
    """The value that `to_bytes` was given; `ProtocolError`, about `what`, for anything that it did not make."""
    try:
        return json.loads(full_text(data, what))
    except (ValueError, RecursionError) as error:
        if isinstance(error, ProtocolError):
            raise
        raise ProtocolError(f"{what} is not JSON: {error}.", part="control plane") from None
