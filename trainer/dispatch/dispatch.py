"""`WorkerDispatch`: the models of an algorithm, on one or several groups of ranks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NoReturn

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.ckpt_engines.runtime.process_memory import MemoryUse

from .ranks import Ranks
from .role import Role, RoleGroup
from .role_spec import RoleSpec, rank_name

_PART = "worker dispatch"


class WorkerDispatch:
    """The roles of an algorithm, on one or several groups of ranks.

    Roles of one group share its processes and devices. With `shares_device`, the device holds one role at a time. Before a
    call, the parts of the role's state that the call needs are moved onto the device, and the state of the other roles is moved
    to host memory. While a version is published, neither gradients nor optimizer state stay on the device.

    Args:
        roles: The roles.
        groups: Groups of ranks by name, as in `RoleSpec.group`.
        shares_device: Whether the roles of a group take turns on its device, or its only role does with rollouts, by group.
            By default, everything stays on the device.

    Raises:
        ConfigError: Two roles have one name, or a group is missing or has another number of ranks than a role.
    """

    def __init__(
        self,
        roles: Sequence[RoleSpec],
        groups: Mapping[str, Ranks],
        shares_device: Mapping[str, bool] | None = None,
    ) -> None:
        _check(roles, groups)
        self._groups = {}
        for name, ranks in groups.items():
            hosted = [spec for spec in roles if spec.group == name]
            self._groups[name] = RoleGroup(ranks, hosted, shares_device=(shares_device or {}).get(name, False))
        self._roles = {spec.name: Role(spec, self._groups[spec.group]) for spec in roles}

    def __getitem__(self, role: str) -> Role:
        """The role of that name; `ProtocolError` if there is none."""
        if role not in self._roles:
            raise ProtocolError(
                f"there is no role {role!r}.", part=_PART, hint=f"The roles are {', '.join(sorted(self._roles))}."
            )
        return self._roles[role]

    def __contains__(self, role: str) -> bool:
        return role in self._roles

    async def start(self) -> dict[str, int]:
        """Start all ranks and load every role's model. Returns the optimizer steps taken so far, by role."""
        starting = [group.start() for group in self._groups.values()]
        return {role: step for steps in await asyncio.gather(*starting) for role, step in steps.items()}

    async def offload(self) -> None:
        """Move the state of all roles that share a device to host memory, for rollouts that use the device in turn.

        The next call to a role moves back the parts that it needs. Groups that share no device keep everything on it.
        """
        await asyncio.gather(*(group.offload() for group in self._groups.values()))

    async def memory_use(self) -> dict[str, MemoryUse]:
        """The memory that each rank holds, by its name, and its peak since the call before."""
        found = await asyncio.gather(*(group.ranks.call("memory_use") for group in self._groups.values()))
        named = zip(self._groups, found, strict=True)
        return {rank_name(name, rank): each for name, uses in named for rank, each in enumerate(uses)}

    async def watch(self) -> NoReturn:
        """Raise `WorkerDiedError` when a process of any rank dies."""
        watching = [asyncio.create_task(group.ranks.watch()) for group in self._groups.values()]
        try:
            await asyncio.gather(*watching)
            raise AssertionError
        finally:
            for each in watching:
                each.cancel()

    async def close(self) -> None:
        """End every rank. Never raises."""
        await asyncio.gather(*(group.ranks.close() for group in self._groups.values()))


def _check(roles: Sequence[RoleSpec], groups: Mapping[str, Ranks]) -> None:
    if twice := [name for name, count in Counter(spec.name for spec in roles).items() if count > 1]:
        raise ConfigError(f"two roles are called {twice[0]!r}.", part=_PART)
    for spec in roles:
        if spec.group not in groups:
            raise ConfigError(
                f"role {spec.name!r} runs on the group {spec.group!r}, which is not there.",
                part=_PART,
                hint=f"Groups are {', '.join(sorted(groups)) or 'none'}.",
            )
        if spec.config.ranks != groups[spec.group].world:
            raise ConfigError(
                f"role {spec.name!r} has {spec.config.ranks} ranks, and its group {spec.group!r} {groups[spec.group].world}.",
                part=_PART,
                hint="Roles that share processes have as many ranks; give this one a group of its own.",
            )
