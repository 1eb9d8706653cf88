"""The log of injected faults: a file with one JSON object per line."""

from __future__ import annotations

import os

from pydantic import BaseModel, ConfigDict

from ..errors import StorageError
from .fault_config import FaultKind

NO_BUCKET = -1
"""Placeholder in the record of a fault that concerns no bucket: version and index of a fault while connecting, version of a
failed allocation, and index of a fault in the release or reclaim of a version."""


class FaultRecord(BaseModel):
    """One injected fault."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    at: float
    """Seconds since the epoch."""
    half: str
    """Name of the half, or ``"engine"`` for a failed allocation."""
    session: str
    version: int
    """`NO_BUCKET` for a fault while connecting or allocating."""
    index: int
    """Index of the bucket, or `NO_BUCKET` if there is none. For a failed allocation, the number of allocations before it."""
    kind: FaultKind


def append_fault(path: str, record: FaultRecord, part: str) -> None:
    """Append `record` to the log. Raises `StorageError`, in which `part` names the half."""
    line = f"{record.model_dump_json()}\n".encode()
    try:  # a single write to a file opened for appending, so that the lines of several processes never mix
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"cannot write the fault log {path!r}: {error}.",
            part=part,
            hint="Set another checkpoint_engine.options.log.",
        ) from error
