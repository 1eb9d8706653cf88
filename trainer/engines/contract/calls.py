"""`ForwardBackward` and `OptimStep`: the two calls of a training step as data, which engines, roles and runners take."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from weightlane.ckpt_engines import ConfigError

from ...data.batch import LossDenominators, TokenBatch
from ...data.step_result import StepResult
from ...objectives.loss import Loss, OutputName
from ..optimizers.settings import AdamParams
from .engine import SequenceOutputs

R_co = TypeVar("R_co", covariant=True)


class Job(Generic[R_co]):
    """Base of all calls that are data; `R_co` is the type of the result. `weightlane.trainer.runner.jobs` has the others."""

    __slots__ = ()

    kind: ClassVar[str]
    """Name of this kind of job, for events, figures and files."""


@dataclass(frozen=True, slots=True)
class BackwardAnswer:
    """The result of a `ForwardBackward` over all ranks."""

    metrics: Mapping[str, float]
    """See `BackwardResult.metrics`."""
    outputs: Sequence[SequenceOutputs]
    """Outputs of each sequence, in the order of the batch; empty where none were asked for."""


@dataclass(frozen=True, slots=True)
class ForwardBackward(Job[BackwardAnswer]):
    """Add the gradient of a loss to the gradients. Result: metrics of the loss, and `outputs` of each sequence."""

    kind: ClassVar[str] = "forward_backward"

    batch: TokenBatch
    loss: str | Loss
    """A name among ``RoleSpec.losses``, or a loss that can be pickled."""
    denominators: LossDenominators | None = None
    """Tokens and sequences of the full mini-batch; None if `batch` is all of it."""
    outputs: Collection[OutputName] = ()
    adapter: str | None = None

    @property
    def function(self) -> Loss:
        """Return `loss` as a function. Raises `ConfigError` for a name, which only a role can resolve."""
        if isinstance(self.loss, str):
            raise ConfigError(
                f"the loss {self.loss!r} of a joint job is a name.",
                part="training engine",
                hint="Pass the loss itself.",
            )
        return self.loss


@dataclass(frozen=True, slots=True)
class OptimStep(Job[StepResult]):
    """Take an optimizer step with the accumulated gradients."""

    kind: ClassVar[str] = "optim_step"

    adapter: str | None = None
    params: AdamParams | None = None
    """Settings of this step; None for those of the configuration."""
