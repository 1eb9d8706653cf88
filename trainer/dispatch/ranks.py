"""`Ranks`: a group of processes that host roles; and `LocalRanks`, a group that consists of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from weightlane.ckpt_engines import ClosedError, DeadlineExceededError, as_weightlane_error
from weightlane.ckpt_engines.runtime.threads import DaemonThreads

from .rank_worker import RankWorker
from .role_spec import POLICY_GROUP

_CLOSE_S = 10.0


class Ranks(Protocol):
    """A group of ranks, each with a `RankWorker`. Calls reach every rank in the order in which they were made."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    async def rendezvous(self) -> tuple[str, int]:
        """Wait until all ranks run. Returns host and port for their process group."""

    def put(self, value: Any) -> Any:
        """Return a form of `value` that can be an argument of several calls without being sent again."""

    def call(self, method: str, *args: Any) -> Awaitable[list[Any]]:
        """Call a method of every rank's `RankWorker` at once. Returns an awaitable of the answers in rank order."""

    async def watch(self) -> NoReturn:
        """Raise `WorkerDiedError` when a rank's process dies."""

    async def close(self) -> None:
        """End every rank. Never raises."""


class CallLimit:
    """Limits the time of calls that are answered in order: a call's time begins when those before it have ended.

    Its error names `part`, which is called, and `setting`, the key of the configuration that raises the limit.
    """

    def __init__(self, limit_s: float, part: str, setting: str) -> None:
        self._limit_s, self._part = limit_s, part
        self._hint = f"Raise {setting}, or look for a rank that hangs."
        self._last_answer = 0.0
        """When the last call ended, in seconds of the event loop's clock."""

    async def answer(self, call: Coroutine[Any, Any, list[Any]], what: str, hint: str = "") -> list[Any]:
        """Return what `call` returns, or cancel it. Raises `DeadlineExceededError` if it takes too long, or its error."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        answer = asyncio.ensure_future(call)
        try:
            while not answer.done():
                left = max(began, self._last_answer) + self._limit_s - loop.time()
                if left <= 0:
                    raise DeadlineExceededError(
                        f"{what} was not answered within {self._limit_s:.0f} s.",
                        part=self._part,
                        hint=hint or self._hint,
                    )
                await asyncio.wait([answer], timeout=left)
            self._last_answer = loop.time()
            return answer.result()
        finally:
            answer.cancel()


class LocalRanks:
    """One rank in this process, on a thread of its own: for programs without a cluster, and for tests.

    Several of them in one process share torch's process group, which ends with the first one.

    A call that takes longer than `timeout_s` raises, and continues in its thread. `group` is part of the rank's name.
    """

    world = 1

    def __init__(self, timeout_s: float = 1800.0, group: str = POLICY_GROUP) -> None:
        self._worker = RankWorker(0, 1, group)
        self._limit, self._closed = CallLimit(timeout_s, "local rank", "timeout_s"), False
        self._thread = DaemonThreads(1, "local-rank")

    async def rendezvous(self) -> tuple[str, int]:
        """See `Ranks.rendezvous`."""
        return self._worker.free_address("127.0.0.1")

    def put(self, value: Any) -> Any:
        """See `Ranks.put`."""
        return value

    def call(self, method: str, *args: Any) -> Awaitable[list[Any]]:
        """See `Ranks.call`. Raises `ClosedError` after `close`."""
        if self._closed:
            raise ClosedError("the rank is closed.", part="local rank")
        return self._limit.answer(self._answer(self._thread.submit(getattr(self._worker, method), *args)), method)

    async def watch(self) -> NoReturn:
        """See `Ranks.watch`: this process lives as long as its caller."""
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        """See `Ranks.close`."""
        if self._closed:
            return
        self._closed = True
        closing = asyncio.wrap_future(self._thread.submit(self._worker.close))
        with suppress(Exception):  # a hanging call may be queued before it
            async with asyncio.timeout(_CLOSE_S):
                await asyncio.shield(closing)
        self._thread.shutdown()

    async def _answer(self, running: Any) -> list[Any]:
        try:
            return [await asyncio.shield(asyncio.wrap_future(running))]
        except Exception as cause:
            raise as_weightlane_error(cause, "local rank") from cause
