"""Pure functions that decide which parts of each role's state must be on a shared device for a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..engines.contract import STATE_PARTS, StatePart

NEEDS: Mapping[str, frozenset[StatePart]] = {
    "forward": frozenset({"parameters"}),
    "forward_backward": frozenset({"parameters", "gradients"}),
    "optim_step": frozenset(STATE_PARTS),
    "drop_gradient": frozenset({"gradients"}),
    "together": frozenset(STATE_PARTS),
    "placement": frozenset({"parameters"}),
    "connect": frozenset({"parameters"}),
    "add_adapter": frozenset({"parameters", "optimizer"}),
    "export_adapter": frozenset({"parameters", "optimizer"}),
    "publish": frozenset({"parameters"}),
    "save": frozenset({"parameters", "optimizer"}),
    "load": frozenset({"parameters", "optimizer"}),
    "export_hf": frozenset({"parameters"}),
}
"""The parts of a role's state that each call to it needs on the device."""


@dataclass(frozen=True, slots=True)
class Moves:
    """Parts to move before a call. Parts that are in place already are not moved."""

    away: Mapping[str, frozenset[StatePart]] = field(default_factory=dict)
    """Parts to offload, by role. They are moved first, to make room."""
    here: Mapping[str, frozenset[StatePart]] = field(default_factory=dict)
    """Parts to bring onto the device, by role."""


def moves_before(method: str, role: str, hosted: Iterable[str]) -> Moves:
    """Return the moves before `method` of `role`, on ranks that host the roles `hosted` and have room for one.

    The state of the other roles is offloaded. Parts of the role itself that `method` doesn't need stay where they are, except
    for ``publish``: there, gradients and optimizer state are offloaded, because the rollout's engines may need the memory.
    """
    needed = NEEDS.get(method, frozenset())
    if not needed:
        return Moves()
    away: dict[str, frozenset[StatePart]] = {other: frozenset(STATE_PARTS) for other in hosted if other != role}
    if method == "publish":
        away[role] = frozenset(STATE_PARTS) - needed
    return Moves(away, {role: needed})
