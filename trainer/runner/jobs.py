"""Jobs that a `Runner` executes on the models of a dispatch, each a frozen dataclass with a typed result.

`RlStep` and `SftStep` are complete: forward, backward and optimizer. The other jobs are single calls of a `Role`, for a program
that drives the training from outside. ``adapter=None`` stands for the parameters that the trainer's configuration trains.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from weightlane.ckpt_engines import WeightlaneError

from ..config import LoraConfig
from ..data.batch import LossDenominators, MiniBatch, TokenBatch
from ..data.step_result import StepResult
from ..engines.contract import BackwardAnswer, ForwardBackward, Job, OptimStep, SequenceOutputs
from ..objectives.loss import LOGPROBS, OutputName

__all__ = [
    "JOBS",
    "CreateAdapter",
    "DropGradient",
    "Export",
    "FailMiniBatch",
    "Forward",
    "ForwardBackward",
    "Job",
    "JointJob",
    "Load",
    "OptimStep",
    "Publish",
    "RemoveAdapter",
    "RlStep",
    "Save",
    "SaveAdapter",
    "SftStep",
]


@dataclass(frozen=True, slots=True)
class CreateAdapter(Job[int]):
    """Add an adapter to the model, which replaces one of that name. Result: the optimizer steps that it has taken."""

    kind: ClassVar[str] = "create_adapter"

    name: str
    config: LoraConfig
    source: Path | None = None
    """A directory of `SaveAdapter` with its initial values; None for fresh values from the seed."""
    optimizer: bool = True
    """Whether the optimizer's state and the steps of `source` are resumed, too."""


@dataclass(frozen=True, slots=True)
class RemoveAdapter(Job[None]):
    """Drop an adapter and its optimizer."""

    kind: ClassVar[str] = "remove_adapter"

    name: str


@dataclass(frozen=True, slots=True)
class SaveAdapter(Job[None]):
    """Write an adapter as PEFT's files, with its optimizer's state if `optimizer` is true."""

    kind: ClassVar[str] = "save_adapter"

    name: str
    directory: Path
    optimizer: bool = True


@dataclass(frozen=True, slots=True)
class Forward(Job[list[SequenceOutputs]]):
    """Compute outputs without gradient. Result: those of each sequence, in the order of the batch."""

    kind: ClassVar[str] = "forward"

    batch: TokenBatch
    outputs: Collection[OutputName] = LOGPROBS
    top_k: int = 0
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class JointJob(Job[list[BackwardAnswer | StepResult | WeightlaneError]]):
    """Execute several jobs, each for a different adapter, in one call to the ranks. See `Role.together`.

    Result: the result or the error of each part. A joint job cannot be written to a file; its parts can.
    """

    kind: ClassVar[str] = "joint"

    parts: tuple[ForwardBackward | OptimStep, ...]
    """Their losses are objects, not names in ``RoleSpec.losses``."""


@dataclass(frozen=True, slots=True)
class DropGradient(Job[None]):
    """Drop the accumulated gradients and the record of a failure, so that the mini-batch can start over."""

    kind: ClassVar[str] = "drop_gradient"

    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class FailMiniBatch(Job[None]):
    """Fail the mini-batch of an adapter, as a `ForwardBackward` that fails does, in the place of one that must not be executed.

    It cannot be written to a file: a `JobWorker` makes it.
    """

    kind: ClassVar[str] = "fail_mini_batch"

    reason: str
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class RlStep(Job[StepResult]):
    """Train on one batch by the runner's algorithm: advantages, and the optimizer steps of every role that it trains."""

    kind: ClassVar[str] = "rl_step"

    batch: TokenBatch
    mini_batches: Sequence[MiniBatch] = ()
    """Parts of the batch for a step each; none: one step on all of it."""


@dataclass(frozen=True, slots=True)
class SftStep(Job[StepResult]):
    """Take one step of supervised fine-tuning: the mean negative log-likelihood of the targets."""

    kind: ClassVar[str] = "sft_step"

    batch: TokenBatch
    denominators: LossDenominators | None = None


@dataclass(frozen=True, slots=True)
class Save(Job[None]):
    """Save the full training state of every role that is trained."""

    kind: ClassVar[str] = "save"

    directory: Path


@dataclass(frozen=True, slots=True)
class Load(Job[int]):
    """Resume from a state that `Save` wrote, or start over from a Hugging Face directory. Result: the optimizer steps taken."""

    kind: ClassVar[str] = "load"

    directory: Path
    optimizer: bool = True
    """Whether moments and steps are resumed, too; otherwise training starts over with the weights."""


@dataclass(frozen=True, slots=True)
class Export(Job[None]):
    """Write a Hugging Face model directory, adapters of ``trainer.lora`` added to the weights."""

    kind: ClassVar[str] = "export"

    directory: Path
    dtype: str
    """Name of the weights' dtype, such as ``bfloat16``."""


@dataclass(frozen=True, slots=True)
class Publish(Job[float]):
    """Publish the parameters, or one adapter, as a version. Result: the longest time in seconds that a rank was blocked."""

    kind: ClassVar[str] = "publish"

    version: int
    adapter: str | None = None


JOBS: tuple[type[Job[Any]], ...] = (
    CreateAdapter,
    RemoveAdapter,
    SaveAdapter,
    Forward,
    ForwardBackward,
    OptimStep,
    DropGradient,
    RlStep,
    SftStep,
    Save,
    Load,
    Export,
    Publish,
)
"""All kinds of jobs except `JointJob` and `FailMiniBatch`."""
