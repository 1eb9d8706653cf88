"""Waits of an event loop that a cancellation must not cut short."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Do what must not be left half-done: a caller that is cancelled meanwhile is so when it is done."""
    task, cancelled = asyncio.ensure_future(work), None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not task.cancelled():
            task.exception()  # as in `wait_for_end`
        raise cancelled
    return task.result()


async def wait_for_end(future: asyncio.Future[Any], timeout_s: float) -> None:
    """Return when `future` has ended, in whatever way, or after so long."""
    await asyncio.wait({future}, timeout=timeout_s)
    if future.done() and not future.cancelled():
        future.exception()  # looked at: Python need not mention it
