"""A bucket's seal: a short text from which a receiver can tell that it has the bytes that were sent.

It travels beside the bytes, in the session's signed mailbox or in a document of a stored version, so that buckets may lie
anywhere in memory and a transport carries payload alone. Which bucket it is of follows from where it was found.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from pydantic import TypeAdapter, ValidationError

from weightlane.ckpt_engines import CorruptBucketError, Deadline, ProtocolError

from .checksum import sums, xxh3

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
    what = f"bucket {index} of version {version}"
    kind, _, digits = sealed.partition(":") if isinstance(sealed, str) else ("", "", "")
    if kind == "xxh3":
        found = xxh3(data.cpu())
    elif kind == "sums":
        found = sums(data)
    else:
        raise CorruptBucketError(f"{what} has no valid seal.", part=_PART, peer=peer, hint=_HINT)
    if found != digits:
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


class SealBox(Protocol):
    """Where seals are put: a mailbox that can forget."""

    def put(self, key: str, value: Any) -> None:
        """As `Mailbox.put`."""

    def get(self, key: str, deadline: Deadline) -> Any:
        """As `Mailbox.get`."""

    def delete(self, key: str) -> None:
        """Forget `key`."""


class SealMail:
    """Seals of one session, put by a sender and looked up by its receivers.

    Args:
        mailbox: Private to the session.
    """

    def __init__(self, mailbox: SealBox) -> None:
        self._mailbox = mailbox
        self._put: dict[int, list[int]] = {}
        """The buckets that there are seals of, by version."""

    def put(self, version: int, index: int, sealed: str) -> None:
        """[sender] Before the bucket is sent. Those of older versions go."""
        for older in [other for other in self._put if other < version]:
            for number in self._put.pop(older):
                self._mailbox.delete(_key(older, number))
        self._mailbox.put(_key(version, index), sealed)
        self._put.setdefault(version, []).append(index)

    def get(self, version: int, index: int, deadline: Deadline) -> object:
        """[receiver] What came for that bucket; `DeadlineExceededError` when nothing does."""
        return self._mailbox.get(_key(version, index), deadline)


def _key(version: int, index: int) -> str:
    return f"{version}/{index}"
