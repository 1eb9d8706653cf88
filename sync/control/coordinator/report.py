"""Reports of a sync: the outcome of a version on every replica, and the attempts that failed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from weightlane.ckpt_engines import WeightlaneError

from ...codecs.quantised import QuantisationReport


@dataclass(frozen=True, slots=True)
class CommitReport:
    """The cost of one commit for a replica, as far as the replica knows it."""

    version: int
    blocked_s: float
    """Seconds in which the engine began no decode step, including the rest of the step in progress."""
    load_s: float = 0.0
    """Seconds of `blocked_s` in which the weights were replaced on all ranks."""
    waited_s: float = 0.0
    """Seconds before `blocked_s`: until the call reached the engine and the engine began to handle it."""
    in_flight: int = 0
    """Requests that were generating when the commit began."""
    recomputed_tokens: int = 0
    """Tokens of requests in flight, of prompts and completions, that prefill again because their caches were dropped. A prefix
    that several requests share counts for each of them, although vLLM computes it once."""


class Outcome(StrEnum):
    """The outcome of a version on one replica."""

    COMMITTED = "committed"
    """The version serves."""
    BEHIND = "behind"
    """The replica serves the version it had, bit for bit: the new one was not staged, or its commit changed nothing."""
    QUARANTINED = "quarantined"
    """The replica cannot prove which weights it holds, and gets no requests until a complete version commits there."""
    LOST = "lost"
    """The replica died or does not answer."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica's part in a sync."""

    outcome: Outcome
    error: WeightlaneError | None = None
    """Why the replica did not commit the version; None if it did."""
    blocked_s: float = 0.0
    """Seconds the replica generated nothing because of the commit."""
    staged_s: float = 0.0
    """Seconds from the request for the first byte to the verification of the last one, on the replica's slowest rank."""
    nbytes: int = 0
    """Bytes staged, over all ranks of the replica."""
    install_s: float = 0.0
    """Seconds that its commit took, of which it generated nothing for `blocked_s`. A commit in place begins with the transfer."""
    recomputed_tokens: int = 0
    """Tokens that its requests in flight prefill again because the commit dropped their caches."""


@dataclass(frozen=True, slots=True)
class FailedAttempt:
    """A failed attempt to send or commit a version, on all replicas or on some."""

    session: str
    """The session of the attempt."""
    error: WeightlaneError
    """The first failure, typed."""
    excluded: tuple[str, ...] = ()
    """Replicas that the next attempt excluded, or that did not commit."""

    def to_plain(self) -> dict[str, Any]:
        """The attempt as JSON-representable data, for observers."""
        return {"session": self.session, "error": self.error.to_wire(), "excluded": list(self.excluded)}


@dataclass(frozen=True, slots=True)
class SyncReport:
    """The report of the sync of a committed version."""

    version: int
    latency_s: float
    """Seconds from the start of the sync until the last replica served the version."""
    sent_bytes: int
    """Payload bytes that the trainer ranks handed to the engine, or to rank 0 if it gathers."""
    replicas: Mapping[str, ReplicaReport] = field(default_factory=dict)
    session: str = ""
    """The session in which the version was sent."""
    codec: str = "dense"
    """The codec with which the version was sent."""
    codec_reason: str = ""
    """Why that codec was chosen."""
    quantisation: QuantisationReport | None = None
    """The error of a sample of the quantised elements against the trainer's values; None if nothing is quantised, or if the
    version was read from a store again."""
    failures: tuple[FailedAttempt, ...] = ()
    """The failed attempts at this version, in order."""
    export_s: float = 0.0
    """Seconds in which the slowest trainer rank copied its shards into its snapshot. The transfer begins meanwhile."""

    @property
    def rollout_blocked_s(self) -> float:
        """The longest time any replica generated nothing."""
        return max((report.blocked_s for report in self.replicas.values()), default=0.0)

    @property
    def transfer_s(self) -> float:
        """Seconds in which the slowest replica received and verified the version."""
        return max((report.staged_s for report in self.replicas.values()), default=0.0)

    @property
    def install_s(self) -> float:
        """Seconds of the longest commit."""
        return max((report.install_s for report in self.replicas.values()), default=0.0)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that requests in flight prefill again, on all replicas."""
        return sum(report.recomputed_tokens for report in self.replicas.values())

    def facts(self) -> dict[str, Any]:
        """The report as JSON-representable data, for observers."""
        quantised = {"quantisation_error": self.quantisation.relative_rms} if self.quantisation else {}
        return {
            "seconds": self.latency_s,
            "latency_s": self.latency_s,
            "export_s": self.export_s,
            "transfer_s": self.transfer_s,
            "install_s": self.install_s,
            "rollout_blocked_s": self.rollout_blocked_s,
            "recomputed_tokens": self.recomputed_tokens,
            "sent_bytes": self.sent_bytes,
            **quantised,
            "failures": [failure.to_plain() for failure in self.failures],
            "replicas": {
                name: {
                    "outcome": part.outcome.value,
                    "blocked_s": part.blocked_s,
                    "staged_s": part.staged_s,
                    "nbytes": part.nbytes,
                    "install_s": part.install_s,
                    "recomputed_tokens": part.recomputed_tokens,
                }
                for name, part in self.replicas.items()
            },
        }
