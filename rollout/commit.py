"""The commit of one replica: pause, load, resume, and what to do when one of these fails."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any, Protocol

from weightlane.ckpt_engines import CommitError, DeadlineExceededError, WeightlaneError, WorkerDiedError

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

    def typed(self, cause: BaseException) -> WeightlaneError:
        """What vLLM raised, as one of our errors."""


class CommitFailure(Exception):  # noqa: N818 - never leaves the replica
    """A commit that failed: with which error, and whether the old weights are serving again."""

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
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest  # noqa: PLC0415 - slow to import

    request = WeightTransferUpdateRequest(update_info={"version": version})
    began = loading = loaded = time.monotonic()
    in_flight = replica.clock.commit_begins(version)
    session = touched = False
    try:
        async with asyncio.timeout(replica.config.commit_timeout_s):
            # "keep" freezes requests where they are; clearing preempts them, so that they prefill anew after the resume.
            await engine.pause_generation(mode="keep", clear_cache=replica.config.kv_on_commit == "recompute")
            session = True
            await engine.start_weight_update()
            loading = time.monotonic()
            touched = True
            await engine.update_weights(request)
            loaded = time.monotonic()
            await engine.finish_weight_update(weight_version=str(version))
            await engine.resume_generation()
    except asyncio.CancelledError:
        await _clean_up(engine, session=session, resume=False)
        raise
    except Exception as cause:
        error, intact = _diagnose(replica, cause, version, touched=touched)
        serving = False
        if not isinstance(error, WorkerDiedError):
            # The rank that raised has closed its session; it is still open in the others, and after a timeout in all.
            closed = replica.config.tensor_parallel == 1 and not isinstance(cause, TimeoutError)
            serving = await _clean_up(engine, session=session and not closed, resume=intact and sound)
        raise CommitFailure(error if serving else _distrusted(replica, error), serving=serving) from cause
    blocked_s = time.monotonic() - began
    gap_s = await replica.clock.commit_ends(version, _GAP_WAIT_S)
    return CommitReport(version, blocked_s, loaded - loading, in_flight, gap_s)


def _diagnose(replica: Replica, cause: Exception, version: int, *, touched: bool) -> tuple[WeightlaneError, bool]:
    """The typed error, and whether the old weights are in place in every rank."""
    if isinstance(cause, TimeoutError):
        waited = DeadlineExceededError(
            f"version {version} was not committed within {replica.config.commit_timeout_s:.0f} s.",
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


def _distrusted(replica: Replica, error: WeightlaneError) -> WeightlaneError:
    if isinstance(error, (CommitError, WorkerDiedError)):
        return error
    return CommitError(
        f"the commit did not end well and the weights cannot be trusted: {type(error).__name__}: {error}",
        part=replica.name,
        hint="The replica must not serve until a complete version has been committed.",
    )
