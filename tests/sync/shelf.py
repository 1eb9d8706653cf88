"""A replica with a dictionary for a model, within whatever process makes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from weightlane.ckpt_engines import CommitError, WeightlaneError
from weightlane.sync import CommitReport, Expectation, ExpectedTensor, Subscriber

SHAPE = (3, 2)
"""Of the only tensor, `w`, in float32."""


class Shelf:
    """A replica with a dictionary for a model; `fails` is what its commits raise."""

    def __init__(self, name: str = "rollout-0") -> None:
        self.name = name
        self.model: dict[str, torch.Tensor] = {}
        self.connections = 0
        self.fails: WeightlaneError | None = None
        self._subscriber: Subscriber | None = None

    def subscriber_names(self) -> list[str]:
        return [f"{self.name}/0"]

    async def connect(self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> None:
        self.connections += 1
        self.close()
        expectation = Expectation({"w": ExpectedTensor(SHAPE, frozenset({torch.float32}))})
        self._subscriber = Subscriber(f"{self.name}/0", rendezvous, backend, options, expectation)

    async def commit(self, version: int) -> CommitReport:
        assert self._subscriber is not None
        if self.fails:
            raise self.fails
        self.model = {name: tensor.clone() for name, tensor in self._subscriber.take(version).items()}
        self._subscriber.release(version)
        return CommitReport(version, blocked_s=0.0)

    async def rollback(self, version: int) -> None:
        raise CommitError("kept nothing.", part=self.name)

    async def quarantine(self, error: WeightlaneError) -> None:
        self.model = {}

    def close(self) -> None:
        if self._subscriber is not None:
            self._subscriber.close()
