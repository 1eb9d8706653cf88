"""`RoleGroup`: ranks, and the roles that they host."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from ..engines.contract import STATE_PARTS
from .ranks import Ranks
from .residency import Moves, moves_before
from .role_spec import RoleSpec


class RoleGroup:
    """Ranks that host roles, which may take turns on the ranks' devices.

    Args:
        ranks: The ranks.
        roles: Names of the roles.
        shares_device: Whether there is room for one role at a time, see `WorkerDispatch`.
    """

    def __init__(self, ranks: Ranks, roles: Sequence[str], *, shares_device: bool) -> None:
        self.ranks, self.roles, self._shares_device = ranks, roles, shares_device

    def call(self, role: str, method: str, *args: Any) -> Awaitable[list[Any]]:
        """Call `method` for `role` on every rank at once. Returns the answers in rank order."""
        moves = moves_before(method, role, self.roles) if self._shares_device else Moves()
        return self.ranks.call("call", role, moves, method, *args)

    async def start(self, specs: Sequence[RoleSpec]) -> dict[str, int]:
        """Load the roles' models, one after the other. Returns the optimizer steps that each has taken."""
        address, steps = await self.ranks.rendezvous(), {}
        for spec in specs:
            steps[spec.name] = (await self.ranks.call("setup", spec, address))[0]
            if self._shares_device:
                await self._offload(spec.name)  # to make room for the next one
        return steps

    async def offload(self) -> None:
        """Move the state of roles that share the device to host memory. The next call moves back the parts that it needs."""
        if self._shares_device:
            await self._offload(*self.roles)

    async def _offload(self, *roles: str) -> None:
        everything = Moves(dict.fromkeys(roles, frozenset(STATE_PARTS)))
        await self.ranks.call("call", roles[0], everything, "rest")
