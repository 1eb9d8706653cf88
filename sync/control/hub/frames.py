"""The frames of the control plane: the members' requests to the hub, the hub's frames to members, and plain data in both.

Placements are repetitive: two thousand entries compress to a tenth. The hub of a run sends the same ones to every rank.
"""

from __future__ import annotations

import json
import zlib
from enum import IntEnum
from typing import Any

from weightlane.ckpt_engines import ProtocolError

COORDINATOR = "coordinator"
"""Name of the coordinator's inbox. Only this inbox keeps messages that arrive before it is read: trainers may start earlier."""

_LONG_BYTES = 4 << 10
"""Length from which text is compressed. Compressing a shorter one takes longer than sending it."""
_LEVEL = 1
_ZLIB_START = b"\x78"
"""The first byte of zlib's format (RFC 1950). JSON never begins with it."""
MOST_BYTES = 4 << 30
"""Limit for the length of decompressed text, which bounds the memory that a member can make another one use."""


class Kind(IntEnum):
    """The meaning of a frame. The frame's name is an inbox, or a scope, to which a line feed and a key may be appended."""

    LISTEN = 1
    """[member] The member reads the inbox from now on."""
    POST = 2
    """[member] Send the payload to the reader of the inbox."""
    PUT = 3
    """[member] Store the payload under the key."""
    DELETE = 4
    """[member] Delete the key."""
    GET = 5
    """[member] Request the value of the key. The reply is `VALUE`, once the key exists."""
    GATHER = 6
    """[member] Request all values of the scope (see `gathered`). The reply is `VALUE`, once as many keys exist as the payload
    says."""
    CANCEL = 7
    """[member] Cancel an earlier request of the same name; the payload is a JSON list of that request's number and payload. The
    reply, under the number of this frame, is `VALUE` with the keys in the scope; there is no reply if that number is 0."""
    STORE = 8
    """[member] Request the port of the torch store. The reply is `VALUE`."""
    MESSAGE = 9
    """[hub] The payload was posted to the inbox."""
    VALUE = 10
    """[hub] The reply to the request of this number."""
    OVER = 11
    """[hub] The request of this number has failed; the payload is the reason."""


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
