"""`Errands`: what is to be done on the trainer ranks between two requests, such as a publication for a sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from weightlane.ckpt_engines import DeadlineExceededError, WorkerDiedError

_WAIT_S = 600.0
"""Most seconds that an errand waits until it is ready."""


@dataclass(frozen=True, slots=True, eq=False)
class Errand:
    """Something to be done between two requests."""

    work: Callable[[], Awaitable[Any]]
    ready: Callable[[], bool]
    done: asyncio.Future[Any]


class Errands:
    """Errands that wait, oldest first.

    Args:
        changed: Called when there is one more.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed, self._waiting, self._closed = changed, list[Errand](), False

    async def wait_for(self, work: Callable[[], Awaitable[Any]], ready: Callable[[], bool]) -> Any:
        """Let something be done as soon as it is `ready`; what it returns.

        Raises:
            DeadlineExceededError: It was not ready within ten minutes.
        """
        errand = Errand(work, ready, asyncio.get_running_loop().create_future())
        if self._closed:
            raise asyncio.CancelledError  # the caller's request stays in the store
        self._waiting.append(errand)
        self._changed()
        try:
            await asyncio.wait([errand.done], timeout=_WAIT_S)
        finally:
            begun = errand not in self._waiting
            if not begun:
                self._waiting.remove(errand)
        if not begun:
            raise DeadlineExceededError(
                f"the trainer ranks were not free within {_WAIT_S:.0f} s.",
                part="service training",
                hint="Another version is on its way, or the model that they have is amid a mini-batch: optim_step ends it.",
            )
        return await errand.done

    def next(self) -> Errand | None:
        """The oldest one that is ready."""
        return next((each for each in self._waiting if each.ready()), None)

    async def run(self, errand: Errand) -> None:
        """Do one. Raises what ends a service: the death of a rank."""
        self._waiting.remove(errand)
        if errand.done.cancelled():
            return
        try:
            result = await errand.work()
        except WorkerDiedError as error:
            errand.done.set_exception(error)
            raise
        except Exception as error:  # noqa: BLE001 - the caller gets it
            errand.done.set_exception(error)
        else:
            if not errand.done.cancelled():
                errand.done.set_result(result)

    def close(self) -> None:
        """Do none any more. The requests that wait for them stay in the store."""
        self._closed = True
        waiting, self._waiting = self._waiting, []
        for errand in waiting:
            errand.done.cancel()
