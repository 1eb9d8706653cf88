"""`AttemptError`: a failed attempt at a version. `blame` finds the replicas at fault for failures that participants report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from weightlane.ckpt_engines import (
    DeadlineExceededError,
    ManifestError,
    QuarantinedError,
    SupersededError,
    TransportError,
    WeightlaneError,
    error_from_wire,
)

from ..messages import Failed
from .replicas import Roster

_PEER_LOST = TransportError | DeadlineExceededError | QuarantinedError
"""Errors that mean a peer was lost. `QuarantinedError` is raised when the loss interrupts an in-place commit."""


class AttemptError(Exception):
    """An attempt to connect the participants, or to send a version to them, has failed.

    Attributes:
        error: The typed failure.
        culprits: Names of the replicas at fault; empty when no replica can be blamed.
        final: Another attempt would fail as well.
        free_retry: The next attempt avoids the cause, and does not count as a retry.
    """

    def __init__(
        self, error: WeightlaneError, culprits: Iterable[str] = (), *, final: bool = False, free_retry: bool = False
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.culprits = frozenset(culprits)
        self.final = final
        self.free_retry = free_retry


def blame(failures: Sequence[Failed], roster: Roster) -> AttemptError:
    """The error of an attempt in which participants reported `failures`, with the replicas at fault."""

    def replicas_named(error: WeightlaneError) -> set[str]:
        return roster.replicas_of(error.peer.split(", "))

    # A sender's error names the receiver that did not take a bucket.
    for failure in failures:
        error = error_from_wire(failure.error)
        if failure.name in roster.publishers and (named := replicas_named(error)):
            return AttemptError(error, named)
    # If a receiver has lost its sender, or has timed out waiting for it, the receiver is not at fault.
    lost = _lost_peers(failures)
    for failure in failures:
        if roster.entry_of(failure.name) is None:
            continue
        error = error_from_wire(failure.error)
        if isinstance(error, _PEER_LOST):
            if failure.name not in lost:
                continue  # its other failure is more specific
            error = _root_cause(failure.name, lost)
            if error.peer in roster.publishers:
                continue
            if named := replicas_named(error):
                return AttemptError(error, named)
        alike = (other.name for other in failures if other.error["type"] == failure.error["type"])
        return AttemptError(error, roster.replicas_of(alike))
    first = failures[0]
    error = _root_cause(first.name, lost) if first.name in lost else error_from_wire(first.error)
    return AttemptError(error, final=isinstance(error, SupersededError | ManifestError))


def _lost_peers(failures: Iterable[Failed]) -> dict[str, WeightlaneError]:
    """The errors of participants that report a lost peer and no other failure, by the participant's name."""
    lost: dict[str, WeightlaneError] = {}
    failed_itself = set()
    for failure in failures:
        error = error_from_wire(failure.error)
        if isinstance(error, _PEER_LOST):
            lost.setdefault(failure.name, error)
        else:
            failed_itself.add(failure.name)
    return {name: error for name, error in lost.items() if name not in failed_itself}


def _root_cause(name: str, lost: Mapping[str, WeightlaneError]) -> WeightlaneError:
    """Follow the chain of ranks that wait for one another from `name`. Returns the last error, which names the root cause.

    If two ranks blame each other, the report of `name`, which came first, counts: a sender fails before its receiver.
    """
    error, visited = lost[name], {name}
    while (cause := lost.get(error.peer)) is not None and cause.peer not in visited:
        visited.add(error.peer)
        error = cause
    return error
