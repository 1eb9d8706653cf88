"""What became of a version."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol


class CommitOutcome(Protocol):
    """What a replica reports of one commit. Supplied by the rollout side."""

    @property
    def version(self) -> int:
        """The version now serving."""

    @property
    def blocked_s(self) -> float:
        """Seconds during which the replica generated nothing because of the commit."""


@dataclass(frozen=True, slots=True)
class CommitReport:
    """The least a replica can report of a commit; a `CommitOutcome`."""

    version: int
    blocked_s: float


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica's part in a sync."""

    outcome: str
    """``committed`` or ``failed``."""
    blocked_s: float
    """Seconds the replica generated nothing because of the commit."""
    staged_s: float
    """Seconds from the first byte asked for to the last one verified, on its slowest rank."""
    nbytes: int
    """Bytes staged, over all ranks of the replica."""


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A committed version."""

    version: int
    latency_s: float
    """Seconds from the start of the sync until the last replica served the version."""
    sent_bytes: int
    """Payload bytes the trainer ranks handed to the transport or to the sending rank."""
    replicas: dict[str, ReplicaReport] = field(default_factory=dict)

    @property
    def rollout_blocked_s(self) -> float:
        """The longest time any replica generated nothing."""
        return max((report.blocked_s for report in self.replicas.values()), default=0.0)
