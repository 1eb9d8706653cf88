"""Time limits of an engine's actions, and threads for blocking calls, for which neither a limit nor the program's end waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from weightlane.ckpt_engines.runtime.threads import start_call

P = ParamSpec("P")
T = TypeVar("T")


@asynccontextmanager
async def limited(limit_s: float, late: Exception) -> AsyncIterator[None]:
    """Raise `late` if what is inside takes longer than `limit_s` seconds; an error from inside stays as it is."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            yield
    except TimeoutError as cause:
        if not limit.expired():
            raise
        raise late from cause


async def on_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """The result of a blocking `call` on a daemon thread of its own.

    Unlike with `asyncio.to_thread`, neither the event loop nor the program waits at its end for a call that was given up.
    """
    return await asyncio.wrap_future(start_call(partial(call, *args, **kwargs)))
