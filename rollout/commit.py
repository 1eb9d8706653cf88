"""How one replica's weights are exchanged: pause, load, resume, and what to do when one of these fails."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Protocol

from weightlane.ckpt_engines import (
    DeadlineExceededError,
    QuarantinedError,
    UntouchedError,
    WeightlaneError,
    WorkerDiedError,
)

from .config import RolloutConfig
from .records import CommitReport
from .token_clock import TokenClock
from .wire import failure_from_text

_GAP_WAIT_S = 0.5
_CLEAN_UP_S = 10.0


class Replica(Protocol):
    """What a commit needs to know of its replica."""

    name: str
    config: RolloutConfig
    clock: TokenClock
    exchanges: int
    """How often its weights were about to change; counted before the pause, so that requests can tell what they began under."""

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
    After a failure that leaves them untrusted, or a cancellation, the engine stays paused.

    Raises:
        CommitFailure: Always this one, whatever failed.
    """
    in_flight = replica.clock.commit_begins(version)
    blocked_s, load_s = await _exchange(replica, engine, {"version": version}, version, sound=sound)
    gap_s = await replica.clock.commit_ends(version, _GAP_WAIT_S)
    return CommitReport(version, blocked_s, load_s, in_flight, gap_s)


async def roll_back(replica: Replica, engine: Any, version: int, before: int) -> float:
    """Take `version`, which serves, back in favour of version `before`. Returns the seconds nothing was generated.

    Raises:
        CommitFailure: As `commit_version`.
    """
    blocked_s, _ = await _exchange(replica, engine, {"rollback_of": version}, before, sound=True)
    return blocked_s


async def _exchange(
    replica: Replica, engine: Any, update: Mapping[str, int], label: int, *, sound: bool
) -> tuple[float, float]:
    """Let every rank make `update` while nothing is generated. Tokens are stamped with the version `label` from then on.

    Returns the seconds from the pause to the resume, and those of the update itself.
    """
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest  # noqa: PLC0415 - slow to import

    request = WeightTransferUpdateRequest(update_info=dict(update))
    began = loading = loaded = time.monotonic()
    session = touched = False
    try:
        async with asyncio.timeout(replica.config.commit_timeout_s):
            replica.exchanges += 1
            # "keep" freezes requests where they are; clearing preempts them, so that they prefill anew after the resume.
            await engine.pause_generation(mode="keep", clear_cache=replica.config.kv_on_commit == "recompute")
            session = True
            await engine.start_weight_update()
            loading = time.monotonic()
            touched = True
            await engine.update_weights(request)
            loaded = time.monotonic()
            await engine.finish_weight_update(weight_version=str(label))
            await engine.resume_generation()
    except asyncio.CancelledError:
        await _clean_up(engine, session=session, resume=False)
        raise
    except Exception as cause:
        error, intact = _diagnose(replica, cause, touched=touched)
        serving = False
        if not isinstance(error, WorkerDiedError):
            # The rank that raised has closed its session; it is still open in the others, and after a timeout in all.
            closed = replica.config.tensor_parallel == 1 and not isinstance(cause, TimeoutError)
            serving = await _clean_up(engine, session=session and not closed, resume=intact and sound)
        told = untouched(error, replica.name) if serving else _distrusted(replica, error)
        raise CommitFailure(told, serving=serving) from cause
    return time.monotonic() - began, loaded - loading


def _diagnose(replica: Replica, cause: Exception, *, touched: bool) -> tuple[WeightlaneError, bool]:
    """The typed error, and whether the old weights are in place in every rank."""
    if isinstance(cause, TimeoutError):
        waited = DeadlineExceededError(
            f"the weights were not exchanged within {replica.config.commit_timeout_s:.0f} s.",
            part=replica.name,
            hint="Raise rollout.commit_timeout_s.",
        )
        return waited, not touched
    if isinstance(error := replica.typed(cause), WorkerDiedError):
        return error, False
    failure = failure_from_text(str(cause), part=replica.name)
    return failure.error, failure.intact or not touched


async def _clean_up(engine: Any, *, session: bool, resume: bool) -> bool:
    """End a failed session that is still open, and with `resume` go on generating. Returns whether the engine serves.

    vLLM runs calls in order, so this waits for a load that has outlived its deadline.
    """
    try:
        async with asyncio.timeout(_CLEAN_UP_S):
            if session:
                with suppress(Exception):  # The rank that raised has none.
                    await engine.finish_weight_update()
            if resume:
                await engine.resume_generation()
    except Exception:  # noqa: BLE001 - the caller raises the error that led here
        return False
    return resume


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
