"""Checksums of buckets: a receiver compares them to prove that it has the sent bytes.

A checksum is sent separately from its bucket: in the control message ahead of the bucket, or in one message for a stored version.
So the transport sends only payload, and buckets may lie anywhere in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
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


def verify(data: torch.Tensor, checksum: str, version: int, index: int, *, peer: str) -> None:
    """Compare received `data` with the sender's checksum. Raises `CorruptBucketError` if they differ."""
    kind = checksum.partition(":")[0]
    found = ""
    if kind == "xxh3":
        found = f"{kind}:{xxh3(data.cpu())}"
    elif kind == "mixed":
        found = f"{kind}:{mixed_sum(data)}"
    compare(found, checksum, version, index, peer=peer)


def compare(found: str, checksum: str, version: int, index: int, *, peer: str) -> None:
    """Compare the checksum `found` of received bytes (empty for an unknown algorithm) with the sender's; raises as `verify`."""
    what = f"bucket {index} of version {version}"
    if not found:
        raise CorruptBucketError(f"{what} has no valid checksum.", part=_PART, peer=peer, hint=_HINT)
    if found != checksum:
        raise CorruptBucketError(f"{what} arrived with changed bytes.", part=_PART, peer=peer, hint=_HINT)


def checksums_document(checksums: Sequence[str]) -> str:
    """The text of a `CHECKSUMS_FILE`."""
    return json.dumps(list(checksums), indent=1) + "\n"


def checksums_of_document(text: str, count: int) -> list[str]:
    """The checksums in a `CHECKSUMS_FILE`. Raises `ProtocolError` unless it lists `count` of them."""
    return _checked(lambda: _CHECKSUMS.validate_json(text, strict=True), CHECKSUMS_FILE, count)


def _checked(parse: Callable[[], list[str]], what: str, count: int) -> list[str]:
    try:
        checksums = parse()
    except ValidationError as error:
        raise ProtocolError(f"{what} is not valid: {error.errors()[0]['msg']}.", part=_PART) from None
    if len(checksums) != count:
        raise ProtocolError(f"{what} lists {len(checksums)} checksums of {count} buckets.", part=_PART)
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

    def get(self, version: int, count: int, deadline: Deadline) -> list[str]:
        """[receiver] The checksums of a version's `count` buckets. Raises `DeadlineExceededError` or `ProtocolError`."""
        message = self._mailbox.get(str(version), deadline)
        what = f"the message about version {version}"
        return _checked(lambda: _CHECKSUMS.validate_python(message, strict=True), what, count)
