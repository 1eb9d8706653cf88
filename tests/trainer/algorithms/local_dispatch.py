"""Roles with real engines in the process of the test."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from waiting import HANG_S

from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.ranks import LocalRanks
from weightlane.trainer.dispatch.role_spec import RoleSpec


def in_dispatch(roles: Sequence[RoleSpec], use: Callable[[WorkerDispatch], Awaitable[Any]]) -> Any:
    """The result of `use` on a dispatch of `roles`."""

    async def run() -> Any:
        dispatch = WorkerDispatch(list(roles), {"trainer": LocalRanks(HANG_S)})
        try:
            await dispatch.start()
            return await use(dispatch)
        finally:
            await dispatch.close()

    return asyncio.run(run())
