"""`Ranks`: a group of processes that host roles; and `LocalRanks`, a group that consists of this process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, NoReturn, Protocol

from weightlane.ckpt_engines import DeadlineExceededError, as_weightlane_error

from .rank_worker import RankWorker

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


class LocalRanks:
    """One rank in this process, on a thread of its own: for programs without a cluster, and for tests.

    Several of them in one process share torch's process group, which ends with the first one.

    Args:
        timeout_s: Longest time of a call, in seconds. A call that takes longer raises, and continues in its thread.
    """

    world = 1

    def __init__(self, timeout_s: float = 1800.0) -> None:
        self._worker = RankWorker(0, 1)
        self._timeout_s, self._closed = timeout_s, False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-rank")

    async def rendezvous(self) -> tuple[str, int]:
        """See `Ranks.rendezvous`."""
        return self._worker.free_address("127.0.0.1")

    def put(self, value: Any) -> Any:
        """See `Ranks.put`."""
        return value

    def call(self, method: str, *args: Any) -> Awaitable[list[Any]]:
        """See `Ranks.call`."""
        return self._answer(self._thread.submit(getattr(self._worker, method), *args), method)

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
        self._thread.shutdown(wait=False)

    async def _answer(self, running: Any, method: str) -> list[Any]:
        try:
            async with asyncio.timeout(self._timeout_s):
                return [await asyncio.shield(asyncio.wrap_future(running))]
        except TimeoutError as cause:
            if running.done():
                raise
            raise DeadlineExceededError(
                f"{method} was not answered within {self._timeout_s:.0f} s.", part="local rank"
            ) from cause
        except Exception as cause:
            raise as_weightlane_error(cause, "local rank") from cause
