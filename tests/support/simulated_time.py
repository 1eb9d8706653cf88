"""An event loop whose time passes only while nothing else happens: hours of waiting take no time at all."""

from __future__ import annotations

import asyncio
from typing import Any


class SimulatedTimeLoop(asyncio.SelectorEventLoop):
    """For code that waits for nothing outside of it: no thread, no socket."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        selector: Any = self._selector  # type: ignore[attr-defined]  # of asyncio's own
        select = selector.select

        def skip(timeout: float | None) -> Any:
            ready = select(0)
            if not ready:
                assert timeout is not None, "everybody waits for somebody else"
                self._now += timeout
            return ready

        selector.select = skip

    def time(self) -> float:
        """Return the simulated time in seconds, as the standard library's loops return the real time."""
        return self._now
