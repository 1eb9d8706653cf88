"""How one replica's weights are exchanged, by one call to its engine, and what a failure of it means."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any, Protocol

from weightlane.ckpt_engines import (
    DeadlineExceededError,
    QuarantinedError,
    UntouchedError,
    WeightlaneError,
    WorkerDiedError,
)

from ..config import RolloutConfig
from .records import CommitReport
from .token_clock import TokenClock
from .transfer_calls import WholeCommit
from .wire import failure_from_text

ENGINE_SHARE = 0.9
"""Share of a commit's time after which the engine itself gives up, so that it never resumes for a client that has."""


class Replica(Protocol):
    """What a commit needs to know of its replica."""

    name: str
    config: RolloutConfig
    clock: TokenClock
    exchanges: int
    """How often its weights were about to change; counted before the call, so that requests can tell what they began under."""

    def typed(self, cause: BaseException) -> WeightlaneError:
        """What vLLM raised, as one of our errors."""


class CommitFailure(Exception):  # noqa: N818 - never leaves the replica
    """A commit or rollback that failed: with which error, and whether the old weights are serving again."""

    def __init__(self, error: WeightlaneError, *, serving: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.serving = serving


async def commit_version(replica: Replica, engine: Any, version: int, *, sound: bool) -> CommitReport:
    """Put the staged `version` into service.

    `sound` says whether the weights can be trusted now, so that a commit that fails before loading may resume with them.
    After a failure that leaves them untrusted the engine stays paused. A cancelled commit goes on in the engine.

    Raises:
        CommitFailure: Always this one, whatever failed.
    """
    in_flight = replica.clock.commit_begins(version)
    began = time.monotonic()
    figures = await _exchange(replica, engine, {"version": version}, version, sound=sound)
    replica.clock.commit_ends(version)
    waited_s = time.monotonic() - began - figures["blocked_s"]
    return CommitReport(version, figures["blocked_s"], figures["load_s"], waited_s, in_flight)


async def roll_back(replica: Replica, engine: Any, version: int, before: int) -> float:
    """Take `version`, which serves, back in favour of version `before`. Returns the seconds nothing was generated.

    Raises:
        CommitFailure: As `commit_version`.
    """
    return (await _exchange(replica, engine, {"rollback_of": version}, before, sound=True))["blocked_s"]


async def _exchange(
    replica: Replica, engine: Any, update: Mapping[str, int], label: int, *, sound: bool
) -> dict[str, float]:
    """Let every rank make `update` while nothing is generated. Tokens are stamped with the version `label` from then on.

    Returns the engine's figures: see `weightlane.rollout.vllm.engine_core.exchange_weights`.
    """
    limit_s = replica.config.commit_timeout_s
    whole = WholeCommit(
        weight_version=str(label),
        caches=replica.config.kv_on_commit,
        within_s=ENGINE_SHARE * limit_s,
        sound=sound,
    )
    try:
        async with asyncio.timeout(limit_s):
            replica.exchanges += 1
            info = {**update, "whole": whole.model_dump()}
            figures: dict[str, float]
            (figures,) = await engine.collective_rpc("update_weights", kwargs={"update_info": info})
    except Exception as cause:
        error, intact = _diagnose(replica, cause)
        serving = intact and sound
        told = untouched(error, replica.name) if serving else _distrusted(replica, error)
        raise CommitFailure(told, serving=serving) from cause
    return figures


def _diagnose(replica: Replica, cause: Exception) -> tuple[WeightlaneError, bool]:
    """The typed error, and whether the old weights are in place in every rank."""
    if isinstance(cause, TimeoutError):
        waited = DeadlineExceededError(
            f"the weights were not exchanged within {replica.config.commit_timeout_s:.0f} s.",
            part=replica.name,
            hint="Raise rollout.commit_timeout_s.",
        )
        return waited, False
    if isinstance(error := replica.typed(cause), WorkerDiedError):
        return error, False
    failure = failure_from_text(str(cause), part=replica.name)
    return failure.error, failure.intact


def untouched(error: WeightlaneError, name: str) -> UntouchedError:
    """`error` as one that says that the old version of replica `name` serves on: see `weightlane.sync.Replica`."""
    if isinstance(error, UntouchedError):
        return error
    return UntouchedError(
        f"the old weights are in place: {type(error).__name__}: {error}", part=name, peer=error.peer, hint=""
    )


def _distrusted(replica: Replica, error: WeightlaneError) -> WeightlaneError:
    """`error` as one that says, by its type alone, that the replica must not serve."""
    if isinstance(error, QuarantinedError | WorkerDiedError):
        return error
    return QuarantinedError(
        f"the commit did not end well and the weights cannot be trusted: {type(error).__name__}: {error}",
        part=replica.name,
        hint="The replica must not serve until a complete version has been committed.",
    )
