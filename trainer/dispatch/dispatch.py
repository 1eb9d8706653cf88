"""`WorkerDispatch`: the models of an algorithm, on one or several groups of ranks."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NoReturn

from weightlane.ckpt_engines import ConfigError, ProtocolError

from .ranks import Ranks
from .role import Role
from .role_group import RoleGroup
from .role_spec import RoleSpec

_PART = "worker dispatch"


class WorkerDispatch:
    """The roles of an algorithm, on one or several groups of ranks.

    Roles of one group share its processes and devices. With `shares_device`, there is room for one of them at a time: before a
    call, the parts of its state that it needs are brought onto the device, and those of the other roles are moved to the host's
    memory; while a version is published, neither gradients nor optimizer state stay on it.

    Args:
        roles: The roles.
        groups: Groups of ranks by the names that roles give.
        shares_device: Whether roles take turns on the device, by group; or rollouts do with a group's only role. By default,
            everything stays on it.

    Raises:
        ConfigError: Two roles have one name, a group is missing, has another number of ranks than a role, or cannot host its
            roles together.
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
            hosted = [spec.name for spec in roles if spec.group == name]
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
        """Start all ranks and load every role's model; the optimizer steps that each has taken so far."""
        starting = [group.start([self._roles[role].spec for role in group.roles]) for group in self._groups.values()]
        return {role: step for steps in await asyncio.gather(*starting) for role, step in steps.items()}

    async def offload(self) -> None:
        """Move everything of the roles that share a device off it, for rollouts that take turns with them.

        The next call to a role brings back what it needs. Groups that share no device keep everything there.
        """
        await asyncio.gather(*(group.offload() for group in self._groups.values()))

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
        engines = Counter(other.config.engine for other in roles if other.group == spec.group)
        if engines["megatron"] > 1:
            raise ConfigError(
                f"the group {spec.group!r} hosts two roles of the megatron engine, whose process groups are global.",
                part=_PART,
                hint="Give one of them a group of its own.",
            )
