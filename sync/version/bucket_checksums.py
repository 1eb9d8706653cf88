"""A bucket's seal: a short text from which a receiver can tell that it has the bytes that were sent.

It travels beside the bytes, with what a sender says ahead of each bucket or in one message for a stored version, so that
buckets may lie anywhere in memory and a transport carries payload alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter, ValidationError

from weightlane.ckpt_engines import CorruptBucketError, Deadline, ProtocolError
from weightlane.ckpt_engines.runtime.device_checksum import sums, xxh3

SEALS_FILE = "seals.json"
"""The document of a stored version that lists the seals of its buckets."""
_PART = "bucket check"
_HINT = (
    "A version with such a bucket is never served; if this repeats, suspect the transport or the memory of this host."
)
_SEALS: TypeAdapter[list[str]] = TypeAdapter(list[str])


def seal(data: torch.Tensor) -> str:
    """The seal of `data`, contiguous 1-D uint8: which checksum, and its digits."""
    return f"xxh3:{xxh3(data)}" if data.device.type == "cpu" else f"sums:{sums(data)}"


def verify(data: torch.Tensor, sealed: object, version: int, index: int, *, peer: str) -> None:
    """Compare received `data` with the seal that came for it; `CorruptBucketError` when they do not belong together."""
    kind = sealed.partition(":")[0] if isinstance(sealed, str) else ""
    found = ""
    if kind == "xxh3":
        found = f"{kind}:{xxh3(data.cpu())}"
    elif kind == "sums":
        found = f"{kind}:{sums(data)}"
    compare(found, sealed, version, index, peer=peer)


def compare(found: str, sealed: object, version: int, index: int, *, peer: str) -> None:
    """As `verify`, of a bucket whose own seal is `found`; empty if `sealed` is of no kind that is known."""
    what = f"bucket {index} of version {version}"
    if not found or not isinstance(sealed, str):
        raise CorruptBucketError(f"{what} has no valid seal.", part=_PART, peer=peer, hint=_HINT)
    if found != sealed:
        raise CorruptBucketError(f"{what} arrived with changed bytes.", part=_PART, peer=peer, hint=_HINT)


def seals_document(seals: Sequence[str]) -> str:
    """The text of a `SEALS_FILE`."""
    return json.dumps(list(seals), indent=1) + "\n"


def seals_of_document(text: str, count: int) -> list[str]:
    """Undo `seals_document`; `ProtocolError` unless it lists `count` seals."""
    try:
        seals = _SEALS.validate_json(text, strict=True)
    except ValidationError as error:
        raise ProtocolError(f"{SEALS_FILE} is not valid: {error.errors()[0]['msg']}.", part=_PART) from None
    if len(seals) != count:
        raise ProtocolError(f"{SEALS_FILE} lists {len(seals)} seals of {count} buckets.", part=_PART)
    return seals


class ChecksumMailbox(Protocol):
    """Where seals are put: a mailbox that can forget."""

    def put(self, key: str, value: Any) -> None:
        """Publish JSON-representable `value` under `key`."""

    def get(self, key: str, deadline: Deadline) -> Any:
        """Wait for `key` and return its value; `DeadlineExceededError` when it does not appear in time."""

    def delete(self, key: str) -> None:
        """Forget `key`."""


class StoredChecksums:
    """The seals of versions that lie in a store, where no sender says them to a receiver: one message for each version.

    Args:
        mailbox: Private to the session.
    """

    def __init__(self, mailbox: ChecksumMailbox) -> None:
        self._mailbox = mailbox
        self._put: list[int] = []

    def put(self, version: int, seals: Sequence[str]) -> None:
        """[sender] All of a version's, when all its buckets are stored. Those of older versions go."""
        while self._put:
            self._mailbox.delete(str(self._put.pop()))
        self._mailbox.put(str(version), list(seals))
        self._put.append(version)

    def get(self, version: int, deadline: Deadline) -> Sequence[object]:
        """[receiver] The version's, by bucket. Raises `DeadlineExceededError` when they do not come, or `ProtocolError`."""
        seals = self._mailbox.get(str(version), deadline)
        if not isinstance(seals, list):
            raise ProtocolError(f"what came for version {version} are no seals.", part=_PART)
        return seals


def of_bucket(seals: Sequence[object], index: int) -> object:
    """The seal of bucket `index`, None when there is none."""
    return seals[index] if index < len(seals) else None
