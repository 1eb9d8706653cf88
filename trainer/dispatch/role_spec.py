"""`RoleSpec`: the specification of a role."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ..config import TrainerConfig
from ..objectives.loss import Loss

POLICY_GROUP = "trainer"
"""The group of ranks that hosts the policy, and every role without ranks of its own."""


def rank_name(group: str, rank: int) -> str:
    """The name of a rank in errors and on time lines. In `POLICY_GROUP` it is the name under which the rank publishes."""
    return f"{group}-{rank}"


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A model's role in an algorithm, and the ranks that it runs on."""

    name: str
    """Such as ``policy``, ``critic`` or ``reference``."""
    config: TrainerConfig
    """Its training engine; ``frozen`` for a role that is not trained. Roles of one group have the same number of ranks."""
    model_dir: Path
    """A directory that `check_model_dir` accepts, readable on every rank."""
    losses: Mapping[str, Loss] = field(default_factory=dict)
    """Losses that its ranks know by name from the start, so that no call has to send one."""
    seed: int = 0
    group: str = POLICY_GROUP
    """The group of ranks that hosts it. Roles of one group share processes and devices."""
    state: Path | None = None
    """A saved training state to resume from."""
