"""Roles: models that take part in an algorithm, and the answers that their ranks give."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ..config import TrainerConfig
from ..engines.adam_params import AdamParams
from ..engines.contract import SequenceOutputs
from ..objectives.loss import Loss


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """A model with a part in an algorithm, and where it runs."""

    name: str
    """Such as ``policy``, ``critic`` or ``reference``."""
    config: TrainerConfig
    """Its training engine; ``frozen`` for a role that is not trained. Roles of one group have the same number of ranks."""
    model_dir: Path
    """A directory that `check_model_dir` accepts, readable on every rank."""
    losses: Mapping[str, Loss] = field(default_factory=dict)
    """Losses that its ranks know by name from the start, so that none has to travel with a call."""
    seed: int = 0
    group: str = "trainer"
    """The group of ranks that hosts it. Roles of one group share processes and devices."""
    state: Path | None = None
    """A saved training state to begin with."""


@dataclass(frozen=True, slots=True)
class StepPart:
    """The arguments of one `Role.optim_step` among calls that are made together."""

    adapter: str | None = None
    params: AdamParams | None = None


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one optimizer step; where ranks differ, the figures of the slowest one."""

    step: int
    """Optimizer steps taken so far."""
    grad_norm: float = 0.0
    fence_s: float = 0.0
    """Seconds in which the optimizer waited for the snapshot of the version published before."""
    seconds: float = 0.0
    """Seconds of forward and backward passes since the step before, and of this one."""
    skipped: str = ""
    """Reason why no parameter was changed and `step` is unchanged; empty when all went well."""

    @classmethod
    def slowest(cls, results: Sequence[StepResult]) -> StepResult:
        """The result of a step from those of its ranks."""
        first = results[0]
        fence_s, seconds = max(each.fence_s for each in results), max(each.seconds for each in results)
        return cls(first.step, first.grad_norm, fence_s, seconds, first.skipped)


@dataclass(frozen=True, slots=True)
class RankOutputs:
    """Outputs of the sequences that one rank computed, as a few large tensors, which travel faster than many small ones."""

    indices: Sequence[int]
    lengths: Sequence[int]
    """Tokens of each of these sequences."""
    packed: Mapping[str, torch.Tensor]
    """[tokens of all these sequences, ...] by name."""

    @classmethod
    def of(cls, found: Mapping[int, SequenceOutputs]) -> RankOutputs:
        """Pack outputs by sequence."""
        names = list(next(iter(found.values()), {}))
        return cls(
            list(found),
            [len(outputs[names[0]]) if names else 0 for outputs in found.values()],
            {name: torch.cat([outputs[name] for outputs in found.values()]) for name in names},
        )

    def by_sequence(self) -> dict[int, dict[str, torch.Tensor]]:
        """The outputs of each sequence, as views."""
        split = {name: torch.split(values, list(self.lengths)) for name, values in self.packed.items()}
        return {index: {name: parts[at] for name, parts in split.items()} for at, index in enumerate(self.indices)}
