"""Roles with real engines, in the process of the test or in teams of processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from engine_ranks import Teams
from team_ranks import TeamRanks
from waiting import HANG_S

from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.ranks import LocalRanks, Ranks
from weightlane.trainer.dispatch.role_spec import RoleSpec


def in_dispatch(
    roles: Sequence[RoleSpec],
    use: Callable[[WorkerDispatch], Awaitable[Any]],
    groups: Mapping[str, Ranks] | None = None,
) -> Any:
    """The result of `use` on a dispatch of `roles`, by default in this process, with a thread for each group."""
    ranks = groups or {role.group: LocalRanks(HANG_S, role.group) for role in roles}

    async def run() -> Any:
        dispatch = WorkerDispatch(list(roles), ranks)
        try:
            await dispatch.start()
            return await use(dispatch)
        finally:
            await dispatch.close()

    return asyncio.run(run())


@contextmanager
def team_groups(teams: Teams, roles: Sequence[RoleSpec]) -> Iterator[dict[str, Ranks]]:
    """The groups of `roles`, each in a team of its own: shared ones as far as there are."""
    found: dict[str, Ranks] = {}
    with ExitStack() as stack:
        for name, world in {role.group: role.config.ranks for role in roles}.items():
            shared = world not in [each.world for each in found.values()]
            found[name] = TeamRanks(teams.of(world) if shared else stack.enter_context(teams.new(world)))
        yield found
