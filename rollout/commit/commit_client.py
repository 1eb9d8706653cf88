"""Commits and rollbacks of one replica: each is one call to its engine, whose failure is diagnosed here."""

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
from .remote_failure import failure_from_text
from .token_clock import TokenClock
from .transfer_calls import EngineCommit

ENGINE_SHARE = 0.9
"""Share of a commit's time after which the engine gives up: before its client does, so that it never resumes unnoticed."""


class Engine(Protocol):
    """A replica's engine, as far as a commit uses it."""

    name: str

    async def update_weights(self, update_info: Mapping[str, Any]) -> dict[str, float]:
        """Call ``update_weights`` on every rank; returns the figures of `commit_in_core`."""

    def typed(self, cause: BaseException) -> WeightlaneError:
        """An exception of vLLM's as a `WeightlaneError`."""


class CommitFailure(Exception):  # noqa: N818 - never leaves the replica
    """A failed commit or rollback, with its error and whether the old weights serve again."""

    def __init__(self, error: WeightlaneError, *, serving: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.serving = serving


async def commit_version(
    engine: Engine,
    config: RolloutConfig,
    clock: TokenClock,
    version: int,
    *,
    trusted: bool,
    more: Mapping[str, Any] | None = None,
) -> CommitReport:
    """Put the staged `version` into service.

    `trusted` says whether the weights can be trusted now, so that the engine may resume with them if the commit fails before
    loading. After a failure that leaves the weights untrusted the engine stays paused. A cancelled commit continues in the
    engine. `more` are further fields of the `UpdateRequest`.

    Raises:
        CommitFailure: The only exception, whatever failed.
    """
    in_flight = clock.commit_begins(version)
    began = time.monotonic()
    figures = await _update(engine, config, {**(more or {}), "version": version}, version, trusted=trusted)
    clock.commit_ends(version)
    waited_s = time.monotonic() - began - figures["blocked_s"]
    recomputed = int(figures["recomputed_tokens"])
    clock.recomputed_tokens += recomputed
    return CommitReport(version, figures["blocked_s"], figures["load_s"], waited_s, in_flight, recomputed)


async def roll_back(
    engine: Engine, config: RolloutConfig, version: int, before: int, more: Mapping[str, Any] | None = None
) -> float:
    """Replace `version`, which serves, by version `before`. Returns the seconds in which nothing was generated.

    Raises:
        CommitFailure: As `commit_version`.
    """
    update = {**(more or {}), "rollback_of": version}
    return (await _update(engine, config, update, before, trusted=True))["blocked_s"]


async def _update(
    engine: Engine, config: RolloutConfig, update: Mapping[str, Any], label: int, *, trusted: bool
) -> dict[str, float]:
    """Let every rank make `update` while nothing is generated. Later tokens carry the version `label`."""
    limit_s = config.commit_timeout_s
    if config.adapter is not None:  # cached blocks belong to one adapter, which stays what it is
        config = config.model_copy(update={"kv_on_commit": "keep"})
    options = EngineCommit(
        weight_version=str(label),
        caches=config.kv_on_commit,
        within_s=ENGINE_SHARE * limit_s,
        trusted=trusted,
    )
    try:
        async with asyncio.timeout(limit_s):
            return await engine.update_weights({**update, "engine_commit": options.model_dump()})
    except Exception as cause:
        error, intact = _diagnose(engine, cause, limit_s)
        serving = intact and trusted
        if serving:
            error = untouched(error, engine.name)
        elif not isinstance(error, WorkerDiedError):
            error = quarantined(error, engine.name, "The replica must not serve")
        raise CommitFailure(error, serving=serving) from cause


def _diagnose(engine: Engine, cause: Exception, limit_s: float) -> tuple[WeightlaneError, bool]:
    """The typed error, and whether the old weights are in place on every rank."""
    if isinstance(cause, TimeoutError):
        late = DeadlineExceededError(
            f"the weights were not replaced within {limit_s:.0f} s.",
            part=engine.name,
            hint="Raise rollout.commit_timeout_s.",
        )
        return late, False
    if isinstance(error := engine.typed(cause), WorkerDiedError):
        return error, False
    failure = failure_from_text(str(cause), part=engine.name)
    return failure.error, failure.intact


def untouched(error: WeightlaneError, name: str) -> UntouchedError:
    """`error` as the `UntouchedError` of replica `name`, whose old version serves on: see `weightlane.sync.Replica`."""
    if isinstance(error, UntouchedError):
        return error
    return UntouchedError(
        f"the old weights are in place: {type(error).__name__}: {error}", part=name, peer=error.peer, hint=""
    )


def quarantined(error: WeightlaneError, name: str, state: str) -> QuarantinedError:
    """`error` as the `QuarantinedError` of replica `name`; the hint says which `state` the replica stays in."""
    if isinstance(error, QuarantinedError):
        return error
    return QuarantinedError(
        f"the commit failed and the weights cannot be trusted: {type(error).__name__}: {error}",
        part=name,
        hint=f"{state} until a complete version has been committed.",
    )
