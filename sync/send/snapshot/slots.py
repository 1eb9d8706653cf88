"""`SnapshotSlots`: the memory of the snapshots that a publisher keeps."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock

from weightlane.ckpt_engines import StorageError

from .send_memory import SendMemory

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SnapshotSlot:
    """Memory for one snapshot."""

    memory: SendMemory
    exposed: set[tuple[str, int]] = field(default_factory=set)
    """Pairs of session and version in which receivers may read the memory in place."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBase:
    """A version that serves, and its snapshot: the next delta applies to it."""

    version: int
    identity: str
    slot: SnapshotSlot


class SnapshotSlots:
    """One slot, or two if the snapshot of the version that serves is kept as the base of deltas.

    Args:
        allocate: Allocates memory for a snapshot; may raise `StorageError`.
        part: The publisher, for the log.
    """

    def __init__(self, allocate: Callable[[], SendMemory], part: str) -> None:
        self._allocate = allocate
        self._part = part
        self._slots = [SnapshotSlot(allocate())]
        self._only_one = False
        """Whether there is memory for one slot only."""
        self.base: DeltaBase | None = None
        self.writing = Lock()
        """Held by a thread that writes to a snapshot after it was taken."""

    def free(self) -> SnapshotSlot:
        """A slot for the next snapshot. It is not the base's slot, unless there is memory for one slot only."""
        base = self.base
        for slot in self._slots:
            if base is None or slot is not base.slot:
                return slot
        if not self._only_one:
            try:
                self._slots.append(SnapshotSlot(self._allocate()))
            except StorageError as error:
                self._only_one = True
                _log.warning(
                    "%s sends every version in full: no memory to keep the base of a delta: %s", self._part, error
                )
        if self._only_one:
            self.base = None
        return self._slots[-1]

    def close(self) -> None:
        """Free all memory."""
        self.base = None
        for slot in self._slots:
            slot.memory.close()
