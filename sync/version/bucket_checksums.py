"""Checksums of buckets: a receiver compares them to prove that it has the sent bytes.

A checksum is sent separately from its bucket: in the control message ahead of the bucket, or in one message for a stored version.
So the transport sends only payload, and buckets may lie anywhere in memory.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter, ValidationError

from weightlane.ckpt_engines import CorruptBucketError, Deadline, ProtocolError
from weightlane.ckpt_engines.runtime.tensor_bytes import mixed_sum, xxh3

CHECKSUMS_FILE = "checksums.json"
"""The document of a stored version that lists the checksums of its buckets."""
_PART = "bucket check"
_HINT = (
    "A version with such a bucket is never served; if this repeats, suspect the transport or the memory of this host."
)
_CHECKSUMS: TypeAdapter[list[str]] = TypeAdapter(list[str])


def checksum_of(data: torch.Tensor) -> str:
    """The checksum of `data` (contiguous 1-D uint8), as ``algorithm:digits``."""
    return f"xxh3:{xxh3(data)}" if data.device.type == "cpu" else f"mixed:{mixed_sum(data)}"


def verify(data: torch.Tensor, checksum: object, version: int, index: int, *, peer: str) -> None:
    """Compare received `data` with the sender's checksum. Raises `CorruptBucketError` if they differ."""
    kind = checksum.partition(":")[0] if isinstance(checksum, str) else ""
    found = ""
    if kind == "xxh3":
        found = f"{kind}:{xxh3(data.cpu())}"
    elif kind == "mixed":
        found = f"{kind}:{mixed_sum(data)}"
    compare(found, checksum, version, index, peer=peer)


def compare(found: str, checksum: object, version: int, index: int, *, peer: str) -> None:
    """Compare the checksum `found` of received bytes (empty for an unknown algorithm) with the sender's; raises as `verify`."""
    what = f"bucket {index} of version {version}"
    if not found or not isinstance(checksum, str):
        raise CorruptBucketError(f"{what} has no valid checksum.", part=_PART, peer=peer, hint=_HINT)
    if found != checksum:
        raise CorruptBucketError(f"{what} arrived with changed bytes.", part=_PART, peer=peer, hint=_HINT)


def checksums_document(checksums: Sequence[str]) -> str:
    """The text of a `CHECKSUMS_FILE`."""
    return json.dumps(list(checksums), indent=1) + "\n"


def checksums_of_document(text: str, count: int) -> list[str]:
    """The checksums in a `CHECKSUMS_FILE`. Raises `ProtocolError` unless it lists `count` of them."""
    try:
        checksums = _CHECKSUMS.validate_json(text, strict=True)
    except ValidationError as error:
        raise ProtocolError(f"{CHECKSUMS_FILE} is not valid: {error.errors()[0]['msg']}.", part=_PART) from None
    if len(checksums) != count:
        raise ProtocolError(f"{CHECKSUMS_FILE} lists {len(checksums)} checksums of {count} buckets.", part=_PART)
    return checksums


class SessionMailbox(Protocol):
    """A mailbox of the session: `weightlane.sync.control.rendezvous.Mailbox` in a run."""

    def put(self, key: str, value: Any) -> None:
        """See `Mailbox.put`."""

    def get(self, key: str, deadline: Deadline) -> Any:
        """See `Mailbox.get`."""

    def delete(self, key: str) -> None:
        """See `Mailbox.delete`."""


class StoredChecksums:
    """The checksums of stored versions, one message for each version, in a mailbox of the session."""

    def __init__(self, mailbox: SessionMailbox) -> None:
        self._mailbox = mailbox
        self._put: list[int] = []

    def put(self, version: int, checksums: Sequence[str]) -> None:
        """[sender] Publish the checksums of a version once all its buckets are stored, and delete those of older versions."""
        while self._put:
            self._mailbox.delete(str(self._put.pop()))
        self._mailbox.put(str(version), list(checksums))
        self._put.append(version)

    def get(self, version: int, deadline: Deadline) -> Sequence[object]:
        """[receiver] The checksums of a version, by bucket. Raises `DeadlineExceededError` or `ProtocolError`."""
        checksums = self._mailbox.get(str(version), deadline)
        if not isinstance(checksums, list):
            raise ProtocolError(f"the message for version {version} is no list of checksums.", part=_PART)
        return checksums


def checksum_of_bucket(checksums: Sequence[object], index: int) -> object:
    """The checksum of bucket `index`; None if `checksums` has none."""
    return checksums[index] if index < len(checksums) else None
