"""An event loop beside the test, in which asynchronous parts live from one call of the test to the next."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

from waiting import HANG_S


class Ahead:
    """An event loop in a thread, in which dispatches live."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, begin: Callable[[], Any]) -> Any:
        """The result of an awaitable that `begin` makes in the loop."""

        async def begun() -> Any:
            return await begin()

        return asyncio.run_coroutine_threadsafe(begun(), self.loop).result(HANG_S)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(HANG_S)
        self.loop.close()
