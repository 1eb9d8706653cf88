"""The format of a control message: a JSON object behind the length of its text, four bytes with the lowest first."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size
MAX_MESSAGE_BYTES = 64 * 1024
"""Longest text of a message. A peer's length is checked against it before any memory is taken; real messages have a few kB."""


def encode_message(message: Mapping[str, Any]) -> bytes:
    """Return `message` as the bytes to send."""
    text = json.dumps(message).encode()
    return _LENGTH.pack(len(text)) + text


def text_bytes(head: bytes | bytearray) -> int:
    """Return the length that the first `LENGTH_BYTES` bytes of a message give to its text."""
    return int(_LENGTH.unpack_from(head)[0])


def decode_text(text: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a message's `text`, or None when it holds anything else."""
    try:
        message = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or nested without end
        return None
    return message if isinstance(message, dict) else None
