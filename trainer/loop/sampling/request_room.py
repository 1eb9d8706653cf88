"""`RequestRoom`: how many requests of one replica may be in flight, in groups of different sizes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class RequestRoom:
    """Lets groups begin in their order, a large one too, while all in flight have at most `limit` requests together."""

    def __init__(self, limit: int) -> None:
        self._limit = self._free = limit
        self._turn, self._more = asyncio.Lock(), asyncio.Event()

    @property
    def is_open(self) -> bool:
        """Whether something is free and no group waits for it."""
        return self._free > 0 and not self._turn.locked()

    @asynccontextmanager
    async def taken(self, requests: int) -> AsyncIterator[None]:
        """Wait for room for a group of `requests`, and hold it. A group above the limit gets all of it."""
        needed = min(requests, self._limit)
        async with self._turn:
            while self._free < needed:
                self._more.clear()
                await self._more.wait()
            self._free -= needed
        try:
            yield
        finally:
            self._free += needed
            self._more.set()
