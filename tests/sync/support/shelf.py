"""A replica that connects when it is told to, within whatever process makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from hop import Replica, Rollout

from weightlane.ckpt_engines import WeightlaneError
from weightlane.sync import CommitReport, TensorSpec

SPEC = TensorSpec("w", (3, 2), torch.float32)
"""The only tensor."""


class Shelf(Replica):
    """`fails` is what its commits raise."""

    def __init__(self, name: str = "rollout-0") -> None:
        super().__init__(name, {f"{name}/0": None})
        self.connections = 0
        self.fails: WeightlaneError | None = None
        self._rank: Rollout | None = None

    async def connect(self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> None:
        self.connections += 1
        self.close()
        (name,) = self.ranks
        self.ranks[name] = self._rank = Rollout(name, rendezvous, backend, dict(options), specs={SPEC.name: SPEC})

    async def commit(self, version: int) -> CommitReport:
        if self.fails:
            raise self.fails
        return await super().commit(version)

    def shows(self, value: float) -> bool:
        """Whether every element is `value`."""
        assert self._rank is not None
        return self._rank.holds({SPEC.name: torch.full(SPEC.shape, value)})

    def close(self) -> None:
        if self._rank is not None:
            self._rank.end.close()
