"""What became of a version."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

from weightlane.ckpt_engines import WeightlaneError

from .codecs.quantised import QuantisationReport


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


class Outcome(StrEnum):
    """What became of a version on one replica."""

    COMMITTED = "committed"
    """It serves."""
    BEHIND = "behind"
    """It could not be staged or begun there; the replica serves the version it had, bit for bit."""
    ROLLED_BACK = "rolled back"
    """It served for a moment and was taken back, because too few replicas could take it."""
    QUARANTINED = "quarantined"
    """The replica cannot prove what it holds and gets no requests until a complete version commits there."""
    LOST = "lost"
    """The replica died or does not answer."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica's part in a sync."""

    outcome: Outcome
    error: WeightlaneError | None = None
    """Why it did not take the version; None when it did."""
    blocked_s: float = 0.0
    """Seconds the replica generated nothing because of the commit."""
    staged_s: float = 0.0
    """Seconds from the first byte asked for to the last one verified, on its slowest rank."""
    nbytes: int = 0
    """Bytes staged, over all ranks of the replica."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """One try at carrying a version over that did not succeed, or not for everybody."""

    session: str
    """The connection it ran on."""
    error: WeightlaneError
    """The first failure, typed."""
    excluded: tuple[str, ...] = ()
    """Replicas the version went on without."""

    def to_plain(self) -> dict[str, Any]:
        """As JSON, for observers."""
        return {"session": self.session, "error": self.error.to_wire(), "excluded": list(self.excluded)}


@dataclass(frozen=True, slots=True)
class SyncReport:
    """A committed version."""

    version: int
    latency_s: float
    """Seconds from the start of the sync until the last replica served the version."""
    sent_bytes: int
    """Payload bytes the trainer ranks handed to the transport or to the sending rank."""
    replicas: Mapping[str, ReplicaReport] = field(default_factory=dict)
    session: str = ""
    """The connection that carried it."""
    codec: str = "dense"
    """What it was sent as."""
    codec_reason: str = ""
    """Why."""
    quantisation: QuantisationReport | None = None
    """The error of a sample of the quantised elements against what the trainer has; None where nothing is quantised, and where
    a store's version was read again."""
    failures: tuple[FailedAttempt, ...] = ()
    """What went wrong on the way, in order; empty in a smooth sync."""

    @property
    def rollout_blocked_s(self) -> float:
        """The longest time any replica generated nothing."""
        return max((report.blocked_s for report in self.replicas.values()), default=0.0)

    def facts(self) -> dict[str, Any]:
        """What observers are told of it, as JSON."""
        quantised = {"quantisation_error": self.quantisation.relative_rms} if self.quantisation else {}
        return {
            "seconds": self.latency_s,
            "latency_s": self.latency_s,
            "rollout_blocked_s": self.rollout_blocked_s,
            "sent_bytes": self.sent_bytes,
            **quantised,
            "failures": [failure.to_plain() for failure in self.failures],
            "replicas": {
                name: {
                    "outcome": part.outcome.value,
                    "blocked_s": part.blocked_s,
                    "staged_s": part.staged_s,
                    "nbytes": part.nbytes,
                }
                for name, part in self.replicas.items()
            },
        }
