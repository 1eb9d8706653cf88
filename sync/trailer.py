"""The trailer: 64 bytes behind a bucket's payload that prove which bucket it is and that its bytes are whole.

It stands behind the payload, not in front, so that a receiver can let the engine write every bucket straight to its place
in the staged stream: the trailer lands where the next bucket's payload will overwrite it.
"""

from __future__ import annotations

import struct

import torch

from weightlane.ckpt_engines import CorruptBucketError

from .checksum import checksum

TRAILER_BYTES = 64
_FORMAT = struct.Struct("<8sqqqQQ16x")
_MAGIC = b"WLBUCKT1"
_PART = "bucket check"


def seal(framed: torch.Tensor, version: int, index: int) -> None:
    """Write the trailer of a packed bucket.

    `framed` is a 1-D uint8 tensor: the payload followed by `TRAILER_BYTES` of room.
    """
    payload = framed[:-TRAILER_BYTES]
    trailer = _FORMAT.pack(_MAGIC, version, index, payload.numel(), *checksum(payload))
    framed[-TRAILER_BYTES:].copy_(torch.frombuffer(bytearray(trailer), dtype=torch.uint8))


def verify(framed: torch.Tensor, version: int, index: int, *, peer: str) -> None:
    """Check a received bucket against its trailer and against what was expected; `CorruptBucketError` otherwise."""
    payload = framed[:-TRAILER_BYTES]
    magic, *found = _FORMAT.unpack(bytes(framed[-TRAILER_BYTES:].tolist()))
    what = f"bucket {index} of version {version}"
    hint = "The old version keeps serving; if this repeats, suspect the transport or the memory of this host."
    if magic != _MAGIC:
        raise CorruptBucketError(f"{what} has no valid trailer.", part=_PART, peer=peer, hint=hint)
    if found[:3] != [version, index, payload.numel()]:
        raise CorruptBucketError(
            f"expected {what} with {payload.numel()} bytes, got bucket {found[1]} of version {found[0]} with {found[2]} bytes.",
            part=_PART,
            peer=peer,
            hint=hint,
        )
    if list(checksum(payload)) != found[3:]:
        raise CorruptBucketError(f"{what} arrived with changed bytes.", part=_PART, peer=peer, hint=hint)
