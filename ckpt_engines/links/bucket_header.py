"""`BucketHeader`: the message that a sender's link sends ahead of each bucket."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)  # not frozen, which costs microseconds for every bucket
class BucketHeader:
    """Tells a receiver which bucket comes next, and its checksum."""

    version: int
    index: int
    nbytes: int
    to_all: bool
    """See `Bucket.to_all`."""
    receiver_set: int | None
    """See `Bucket.receiver_set`."""
    checksum: str
    """The checksum as the sender's caller gave it; empty for none."""

    def message(self) -> dict[str, Any]:
        """Return the header as a message; the control connection signs it."""
        return {"bucket": [self.version, self.index, self.nbytes, self.to_all, self.receiver_set, self.checksum]}

    @classmethod
    def of(cls, fields: object) -> BucketHeader | None:
        """Return the header in a message's `fields`, or None when they hold anything else."""
        match fields:
            case [int(version), int(index), int(nbytes), bool(to_all), int() | None as receiver_set, str(checksum)]:
                return cls(version, index, nbytes, to_all, receiver_set, checksum)
        return None
