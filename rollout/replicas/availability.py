"""`Availability`: whether a replica accepts requests, and why not: its weights cannot be trusted, or its memory is freed."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

from weightlane.ckpt_engines import ClosedError, ProtocolError, QuarantinedError, WeightlaneError

from ..contract.engine import RolloutEngine, SleepPart

_DRAIN_S = 0.005
"""Seconds between two looks at whether the last request has ended."""
_WAKES = "It serves again once weights, a version and caches are there."


class Availability:
    """The reasons why the replica `name` accepts no requests. `in_flight` are the keys of those that `engine` computes."""

    def __init__(self, name: str, engine: RolloutEngine, in_flight: Collection[str]) -> None:
        self._name, self._engine, self._in_flight = name, engine, in_flight
        self.broken: WeightlaneError | None = None
        """The reason why the weights cannot be trusted; None while they can. The next commit removes it."""
        self.stops = 0
        """Number of times that the replica was taken out of service."""
        self.asleep: set[SleepPart] = set()
        """The parts of its memory that are freed."""

    @property
    def accepts(self) -> bool:
        """Whether requests are accepted."""
        return self._engine.open and self.broken is None and not self.asleep

    def refuse_if_closed(self) -> None:
        """Raise `ClosedError` if the engine does not run."""
        if not self._engine.open:
            raise ClosedError("the replica is not running.", part=self._name)

    def refuse_if_unavailable(self) -> None:
        """Raise the reason why no requests are accepted, if there is one."""
        self.refuse_if_closed()
        if self.broken is not None:
            raise type(self.broken)(
                self.broken.message,
                part=self._name,
                peer=self.broken.peer,
                hint=_WAKES if self.asleep else "It serves again after the next commit.",
            )
        if self.asleep:
            raise QuarantinedError("the replica is asleep: it has no caches.", part=self._name, hint=_WAKES)

    def refuse_if_stopped(self, stops: int) -> None:
        """Raise if the replica was taken out of service since `stops` was counted."""
        if stops != self.stops:
            self.refuse_if_unavailable()
            raise QuarantinedError("the replica was out of service during the request.", part=self._name)

    async def stop(self, error: WeightlaneError) -> None:
        """Accept no requests because of `error`, and end those in flight."""
        self.broken = error
        self.stops += 1
        await self._engine.abort(self._in_flight)

    async def sleep(self) -> None:
        """See `LocalReplica.sleep`. Nothing else changes the engine meanwhile."""
        if self.asleep:
            return
        before = self.broken
        self.broken = before or QuarantinedError("the replica is asleep: it has no weights.", part=self._name)
        try:
            while self._in_flight:  # noqa: ASYNC110 - each ends by its own deadline
                await asyncio.sleep(_DRAIN_S)
        except asyncio.CancelledError:
            self.broken = before
            raise
        self.asleep = {"weights", "caches"}
        await self._stopping_on_failure(self._engine.sleep())

    async def wake(self, part: SleepPart) -> None:
        """See `LocalReplica.wake`."""
        if part == "caches" and "weights" in self.asleep:
            raise ProtocolError(
                "the caches were to wake before the weights.", part=self._name, hint="Wake the weights first."
            )
        if part in self.asleep:
            await self._stopping_on_failure(self._engine.wake(part))
            self.asleep.discard(part)

    async def _stopping_on_failure(self, change: Coroutine[Any, Any, None]) -> None:
        """Take the replica out of service if `change`, of the engine's memory, fails."""
        try:
            await change
        except WeightlaneError as error:
            await self.stop(error)
            raise
        except asyncio.CancelledError:
            await self.stop(QuarantinedError("a change of its memory was cancelled.", part=self._name))
            raise
