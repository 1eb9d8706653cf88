"""`Replica`: the interface through which the coordinator commits versions on a rollout replica, and the replica's states."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Protocol

from weightlane.ckpt_engines import WeightlaneError

from .report import CommitReport


class Replica(Protocol):
    """A rollout replica as the coordinator sees it. The rollout side supplies it."""

    @property
    def name(self) -> str:
        """The replica's name, e.g. ``"rollout-0"``."""

    def subscriber_names(self) -> Sequence[str]:
        """Names of the subscribers of the replica's ranks."""

    async def commit(self, version: int) -> CommitReport:
        """Put the staged `version` into service on every rank at the same step.

        Raises `UntouchedError` if every rank still serves the version it had, and `WorkerDiedError` if the replica is gone.
        After any other error it is not known which weights the ranks hold, and the replica is quarantined.
        """

    async def rollback(self, version: int) -> None:
        """Undo the commit of `version`: serve the version before it. Raises an error if that is impossible."""

    async def quarantine(self, error: WeightlaneError) -> None:
        """Refuse all requests with `error` until the next commit."""


class ReplicaState(StrEnum):
    """Whether a replica may get requests."""

    JOINING = "joining"
    """The replica has not committed a version of this run yet."""
    SERVING = "serving"
    """Every rank of the replica holds a published version, maybe not the newest."""
    QUARANTINED = "quarantined"
    """The replica cannot prove which weights it holds; it serves again after it has committed a complete version."""
    LOST = "lost"
    """The replica died or does not answer. If it joins again it is `JOINING`, if it answers again `QUARANTINED`."""
