"""Bodies of requests: limits of their size, and decompression within these limits.

Memory for decoding one is at most about four times its bytes plus 24 times `tensors.MOST_CELLS`.
"""

from __future__ import annotations

from typing import Any

import zstandard
from google.protobuf.message import DecodeError

from weightlane.ckpt_engines import ProtocolError

from ..errors import TooLargeError

PART = "request"

_PATH = (3, 2, 2)
"""Numbers of the fields that lead from a ``ForwardBackwardRequest`` to its tensors: ``data``, ``loss_fn_inputs``, ``value``."""
_SHAPE, _SHAPE_BYTES = 4, 64
"""Number of the field ``shape`` of a ``Tensor``, and its most bytes: each can become 8 bytes in memory."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of Protocol Buffers; groups, 3 and 4, occur in no message of ours."""
_PART_BYTES = 2
"""Bytes of the smallest part: a tag, and a length of 0."""
_VARINT_BYTES = 10
"""Bytes of the longest varint, that of a negative number."""
_ADDRESS_BYTES = 1024
"""Bytes that suffice for the address of a pass: an identifier has at most 200 characters, and a number 5 bytes."""
_ADDRESS = (1, 2)
"""Numbers of the fields of a ``ForwardBackwardRequest`` with its address: ``model_id`` and ``seq_id``."""
MOST_PARTS = 2**17
"""Most fields in a body. An empty message takes 2 bytes there, and 30 times as much in memory."""
_WINDOW_BYTES = 8 * 2**20
"""Most memory for reading the beginning of a compressed body. The SDK's bodies need 2 MiB."""


def decompressed(body: bytes, encoding: str, most_bytes: int) -> bytes:
    """The body of a request without its content encoding: the header ``Content-Encoding``, empty, ``identity`` or ``zstd``.

    Raises:
        TooLargeError: The body is too large. No more than `most_bytes` are allocated.
        ProtocolError: The encoding is another one, or the body is not one complete frame that declares its size.
    """
    _check_size(len(body), most_bytes)
    encoding = encoding.strip().lower()
    if encoding in ("", "identity"):
        return body
    if encoding != "zstd":
        raise ProtocolError(f"no content encoding {encoding!r} is offered.", part=PART, hint="Send zstd, or none.")
    try:
        size = zstandard.get_frame_parameters(body).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            raise ProtocolError(
                "the compressed body does not say its size.",
                part=PART,
                hint="Compress it in one call, which writes it.",
            )
        _check_size(size, most_bytes)
        found: bytes = zstandard.ZstdDecompressor().decompress(body, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise ProtocolError(f"the body cannot be decompressed: {error}.", part=PART) from None
    return found


def _check_size(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise TooLargeError(
            f"the body has {size} bytes or more, {most_bytes} are allowed.",
            part=PART,
            hint="Send fewer sequences at once, or raise service.max_body_bytes.",
        )


def address_of(body: bytes, encoding: str) -> bytes:
    """The address, ``model_id`` and ``seq_id``, of a ``ForwardBackwardRequest`` that is too large to be read completely.

    The SDK writes fields in the order of their numbers, so these come first. No more of the body is decompressed.

    Returns:
        A ``ForwardBackwardRequest`` of these fields, in bytes; empty if the body begins with others, or cannot be read.
    """
    try:
        begins = _begins(body, encoding)
        at = 0
        while at < len(begins):
            tag, after = _varint(begins, at, len(begins))
            if tag >> 3 not in _ADDRESS:
                break
            length, after = _length(begins, after, len(begins), tag & 7)
            at = after + length
    except ProtocolError:
        return b""
    return begins[:at]


def _begins(body: bytes, encoding: str) -> bytes:
    """The first `_ADDRESS_BYTES` of a body; `ProtocolError` if it is not compressed as it should be."""
    if encoding.strip().lower() != "zstd":
        return body[:_ADDRESS_BYTES]
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW_BYTES).stream_reader(body) as reader:
            return bytes(reader.read(_ADDRESS_BYTES))
    except zstandard.ZstdError as error:
        raise ProtocolError(f"the body cannot be decompressed: {error}.", part=PART) from None


def parsed(message_class: Any, body: bytes) -> Any:
    """The message in `body`. Raises `ProtocolError` if there is none, or it has more parts than allowed."""
    if len(body) > _PART_BYTES * MOST_PARTS:  # fewer bytes hold fewer parts, and counting is slow
        _count_parts(body)
    try:
        return message_class.FromString(body)
    except DecodeError as error:
        raise ProtocolError(f"the body is no {message_class.DESCRIPTOR.name}: {error}.", part=PART) from None


def _count_parts(body: bytes) -> None:
    """Raise `ProtocolError` if `body` has more than `MOST_PARTS` fields, down to those of tensors, before any is an object."""
    waiting = [(0, len(body), 0)]
    count = 0
    while waiting:
        at, end, depth = waiting.pop()
        while at < end:
            count += 1
            if count > MOST_PARTS:
                raise ProtocolError(
                    f"the body has more than {MOST_PARTS} parts.", part=PART, hint="Send fewer sequences at once."
                )
            tag, at = _varint(body, at, end)
            length, at = _length(body, at, end, tag & 7)
            if length > end - at:
                raise _truncated()
            if depth == len(_PATH):
                if tag == (_SHAPE << 3 | _BYTES) and length > _SHAPE_BYTES:
                    raise ProtocolError("a tensor's shape has more than two dimensions.", part=PART)
            elif tag == (_PATH[depth] << 3 | _BYTES):
                waiting.append((at, at + length, depth + 1))
            at += length


def _length(body: bytes, at: int, end: int, wire_type: int) -> tuple[int, int]:
    """Length in bytes of a value of `wire_type`, and the offset at which it begins."""
    if wire_type == _VARINT:
        return 0, _varint(body, at, end)[1]
    if wire_type == _BYTES:
        return _varint(body, at, end)
    if wire_type in (_FIXED64, _FIXED32):
        return (8 if wire_type == _FIXED64 else 4), at
    raise ProtocolError(f"the body has a field of wire type {wire_type}.", part=PART)


def _varint(body: bytes, at: int, end: int) -> tuple[int, int]:
    """The varint at offset `at`, and the offset after it."""
    value = 0
    for shift in range(_VARINT_BYTES):
        if at >= end:
            break
        byte = body[at]
        at += 1
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:  # noqa: PLR2004  (the highest bit says that more follow)
            return value, at
    raise _truncated()


def _truncated() -> ProtocolError:
    return ProtocolError("the body ends within a field.", part=PART, hint="Send it whole.")
