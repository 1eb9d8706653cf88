"""What a publisher keeps: the version under way, the memory of its snapshot, and the version that deltas apply to."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError, StorageError

from ..codecs.codec_choice import Choice
from ..codecs.delta.encoding import RankDelta
from ..codecs.delta.format import TooDense
from ..version.manifest import CODEC_DELTA, CODEC_DENSE
from .snapshot.progress import Progress
from .snapshot.send_memory import SendMemory
from .snapshot.steps import Leftovers

_log = logging.getLogger(__name__)


def checked_version(version: Any, part: str) -> int:
    """`version` as an int: whoever publishes may have it from NumPy.

    Raises `ConfigError` for what is no whole number from 0.
    """
    try:
        number = operator.index(version)
    except TypeError:
        number = -1
    if number < 0 or isinstance(version, bool):
        raise ConfigError(
            f"a version is a whole number from 0, not {version!r}.",
            part=part,
            hint="The number of the optimizer step will do.",
        )
    return number


@dataclass(slots=True, eq=False)
class SnapshotSlot:
    """Memory for one snapshot."""

    memory: SendMemory
    exposed: set[tuple[str, int]] = field(default_factory=set)
    """Sessions and versions in which receivers were shown it."""


@dataclass(frozen=True, slots=True, eq=False)
class DeltaBase:
    """A version that serves, and its snapshot."""

    version: int
    identity: str
    slot: SnapshotSlot


@dataclass(slots=True, eq=False)
class Publication:
    """A version from `publish` on. Its fields change on the publisher's own threads only."""

    version: int
    identity: str
    """See `Manifest.identity`."""
    mark: Any
    progress: Progress
    """Of its snapshot."""
    number: int = 0
    """Its place among all publications of this run."""
    choice: Choice = field(default_factory=lambda: Choice(CODEC_DENSE, "not chosen yet"))
    """What it is sent as."""
    slot: SnapshotSlot | None = None
    """Where its snapshot is; there once that is being taken."""
    base: DeltaBase | None = None
    """What a delta applies to."""
    began: float = 0.0
    """When its snapshot did."""
    delta: RankDelta | None = None
    """Once it is encoded."""
    encoded_for: str = ""
    """Digest of the layout that its segments are of."""
    remains: Leftovers = field(default_factory=Leftovers)
    """What quantising has left beside the snapshot."""
    replica_digests: dict[int, str] = field(default_factory=dict)
    """Of slices that other ranks hold as well; see `weightlane.sync.send.agreement.replicated_shards`."""
    is_complete: bool = False
    """Whether elements of blocks that other ranks have a part of are quantised, too."""

    @property
    def is_delta(self) -> bool:
        """Whether it is sent as a delta."""
        return self.choice.codec == CODEC_DELTA

    def send_in_full(self, why: str | TooDense) -> None:
        """Not as a delta, after all."""
        self.choice = Choice(CODEC_DENSE, str(why))


class SnapshotSlots:
    """One slot, or two in turn where the version that serves is kept for deltas to apply to.

    Args:
        make: Gets memory for a snapshot; may raise `StorageError`.
        part: Whose they are, for the log.
    """

    def __init__(self, make: Callable[[], SendMemory], part: str) -> None:
        self._make = make
        self._part = part
        self._slots = [SnapshotSlot(make())]
        self._narrow = False
        self.base: DeltaBase | None = None
        """What the next delta applies to."""
        self.writing = Lock()
        """Held while memory is written to by another thread than the one that takes snapshots."""

    @property
    def device(self) -> torch.device:
        """Where snapshots are."""
        return self._slots[0].memory.data.device

    def free(self) -> SnapshotSlot:
        """A slot for the next snapshot: not the base's, unless there is no memory for two."""
        base = self.base
        for slot in self._slots:
            if base is None or slot is not base.slot:
                return slot
        if not self._narrow:
            try:
                self._slots.append(SnapshotSlot(self._make()))
            except StorageError as error:
                self._narrow = True
                _log.warning(
                    "%s: versions are sent in full, there is no memory to keep what deltas apply to: %s",
                    self._part,
                    error,
                )
        if self._narrow:
            self.base = None
            return self._slots[0]
        return self._slots[-1]

    def close(self) -> None:
        """Give all memory back."""
        self.base = None
        for slot in self._slots:
            slot.memory.close()
