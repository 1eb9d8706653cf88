"""A replica that connects when it is told to, within whatever process makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from direct_hop import Rollout

from weightlane.ckpt_engines import CommitError, WeightlaneError
from weightlane.sync import CommitReport, Subscriber, TensorSpec

SPEC = TensorSpec("w", (3, 2), torch.float32)
"""The only tensor."""


class Shelf(Rollout):
    """`fails` is what its commits raise."""

    def __init__(self, name: str = "rollout-0") -> None:
        self.name = name
        self.connections = 0
        self.fails: WeightlaneError | None = None
        self.subscriber: Subscriber | None = None

    async def connect(self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> None:
        self.connections += 1
        self.close()
        super().__init__(self.name, rendezvous, backend, dict(options), None, specs={SPEC.name: SPEC})

    async def commit(self, version: int) -> CommitReport:
        if self.fails:
            raise self.fails
        return await super().commit(version)

    async def rollback(self, version: int) -> None:
        raise CommitError("kept nothing.", part=self.name)

    def shows(self, value: float) -> bool:
        """Whether every element is `value`."""
        return self.holds({SPEC.name: torch.full(SPEC.shape, value)})

    def close(self) -> None:
        if self.subscriber is not None:
            self.subscriber.close()
