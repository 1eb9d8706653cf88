"""`HostedRole`: a role on one rank, with its unfinished mini-batches."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from weightlane.sync import Publisher

from ..engines.contract import TrainingEngine, with_adapters
from ..objectives.loss import Loss


@dataclass(slots=True)
class MiniBatch:
    """A mini-batch whose optimizer step has not been taken yet."""

    computed_s: float = 0.0
    """Seconds of forward and backward passes."""
    failed: str = ""
    """Why a part of it has no gradient; empty if none failed."""


@dataclass(slots=True)
class HostedRole:
    """A role on this rank."""

    engine: TrainingEngine
    losses: Mapping[str, Loss]
    publisher: Publisher | None = None
    fence_s: float = 0.0
    """Seconds that moves to host memory waited for the publisher since the last optimizer step."""
    own: str = ""
    """The adapter of calls that name none; empty for the model's own weights."""
    mini_batches: dict[str, MiniBatch] = field(default_factory=dict)
    """Unfinished mini-batches by adapter; "" is the model's own weights."""

    def adapter(self, name: str | None) -> str:
        """The adapter that a call's argument `name` stands for: `own` if it is None."""
        return self.own if name is None else name

    def steps_of(self, adapter: str | None) -> int:
        """Optimizer steps of the adapter, or of the model if its engine has no adapters."""
        return (
            with_adapters(self.engine, "steps_of").steps_of(adapter) if self.engine.has_adapters else self.engine.step
        )

    def fence(self, names: Collection[str] | None = None) -> float:
        """Wait until the publisher no longer reads the checkpoint tensors `names`, or any if None. Returns the seconds waited."""
        return 0.0 if self.publisher is None else self.publisher.fence(names)
