"""Signed frames: the wire format of the control plane.

A frame has a kind, a number, a name and a payload. It carries an HMAC-SHA256 over its contents and over how many frames came
before it: a frame that was forged, changed, repeated or left out ends the connection. The payload is signed by its digest,
so one payload for many receivers is hashed once.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from weightlane.ckpt_engines import ProtocolError
from weightlane.ckpt_engines.channels.mac import TAG_BYTES, tag

COORDINATOR = "coordinator"
"""Name of the coordinator's inbox. It alone keeps messages that arrive before it is read: trainers may start earlier."""
PART = "control connection"
"""The part that errors of connections name."""
_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<BIH")
"""Kind, number, and length of the name."""
MOST_BYTES = 1 << 30
"""The longest frame, which bounds the memory that a member can make another one use. The manifest of a model with a million
tensors has a tenth of that."""


class Kind(IntEnum):
    """The meaning of a frame. Its name is an inbox, or a scope, to which a line feed and a key may be appended."""

    LISTEN = 1
    """[member] It reads the inbox."""
    POST = 2
    """[member] Hand the payload to the reader of the inbox."""
    PUT = 3
    """[member] Keep the payload under the key."""
    DELETE = 4
    """[member] Forget the key."""
    GET = 5
    """[member] `VALUE` when the key is there."""
    GATHER = 6
    """[member] `VALUE` with everything in the scope (see `gathered`) when as many keys are there as the payload says."""
    CANCEL = 7
    """[member] Do not answer an earlier question of the same name; the payload is a JSON list of its number and payload. `VALUE`,
    under the number of this frame, with the keys in the scope; no answer if that number is 0."""
    STORE = 8
    """[member] `VALUE` with the port of the torch store."""
    READ = 9
    """[member] Everything before the `MARK` of this number was read."""
    MESSAGE = 10
    """[hub] The payload was posted to the inbox."""
    MARK = 11
    """[hub] Answer with `READ` once everything before it in the inbox was read."""
    VALUE = 12
    """[hub] The answer to the question of this number."""
    OVER = 13
    """[hub] The question of this number gets no answer; the payload says why."""


class Frame(NamedTuple):
    """One message on a connection."""

    kind: int
    number: int
    name: str
    payload: bytes


def payload_digest(payload: bytes) -> bytes:
    """The digest that stands for a payload in the signature of its frame."""
    return hashlib.sha256(payload).digest()


def frame_start(frame: Frame, key: bytes, sequence: int, digest: bytes) -> bytes:
    """The bytes to send before the payload: length, signature and head of the frame number `sequence` under `key`.

    Raises `ProtocolError` if the frame is too long.
    """
    name = frame.name.encode()
    head = _HEAD.pack(frame.kind, frame.number, len(name)) + name
    nbytes = TAG_BYTES + len(head) + len(frame.payload)
    if nbytes > MOST_BYTES:
        raise ProtocolError(f"{frame.name}: {nbytes} bytes are too many for one message.", part=PART)
    return _LENGTH.pack(nbytes) + tag(key, sequence, head, digest) + head


class FrameReader:
    """Takes the bytes of one direction of a connection, and verifies and splits them into frames."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._sequence = 0
        self._incoming = bytearray()

    def frames(self, chunk: bytes) -> Iterator[Frame]:
        """Yield the frames that `chunk` completes. Raises `ProtocolError` for bytes that are not signed, or no frame."""
        incoming = self._incoming
        incoming += chunk
        offset = 0
        while len(incoming) - offset >= _LENGTH.size:
            (nbytes,) = _LENGTH.unpack_from(incoming, offset)
            if not TAG_BYTES + _HEAD.size <= nbytes <= MOST_BYTES:
                raise ProtocolError(f"a frame of {nbytes} bytes arrived, which no member of a run sends.", part=PART)
            start = offset + _LENGTH.size
            if len(incoming) - start < nbytes:
                break
            offset = start + nbytes
            yield self._verified(bytes(memoryview(incoming)[start:offset]))
        del incoming[:offset]

    def _verified(self, data: bytes) -> Frame:
        kind, number, length = _HEAD.unpack_from(data, TAG_BYTES)
        end = TAG_BYTES + _HEAD.size + length
        head, payload = data[TAG_BYTES:end], data[end:]
        expected = tag(self._key, self._sequence, head, payload_digest(payload))
        if not secrets.compare_digest(expected, data[:TAG_BYTES]):
            raise ProtocolError("a frame arrived that was not signed with this run's secret.", part=PART)
        self._sequence += 1
        return Frame(kind, number, head[_HEAD.size :].decode(errors="replace"), payload)
