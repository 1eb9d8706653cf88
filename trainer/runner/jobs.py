"""Jobs: what a `Runner` can be asked to do with the models of a dispatch, each a frozen dataclass with a typed result.

`Forward` to `SaveAdapter` are the calls of a `Role` one by one, for a program that drives a training from outside; `RlStep` and
`SftStep` are whole optimizer steps. ``adapter=None`` means the parameters that the trainer's configuration says are trained.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from weightlane.ckpt_engines import WeightlaneError

from ..config import LoraConfig
from ..data.batch import LossDenominators, TokenBatch
from ..data.step_result import StepResult
from ..engines.contract import BackwardAnswer, ForwardBackward, Job, OptimStep, SequenceOutputs
from ..objectives.loss import LOGPROBS, OutputName

__all__ = [
    "JOBS",
    "CreateAdapter",
    "DropGradient",
    "Export",
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
    """Put an adapter beside the model, in the place of one of that name. Result: the optimizer steps that it has taken."""

    kind: ClassVar[str] = "create_adapter"

    name: str
    config: LoraConfig
    source: Path | None = None
    """A directory that `SaveAdapter` wrote, whose values it begins with; None for first values from the seed."""
    optimizer: bool = True
    """Whether the optimizer's state and the steps of `source` are resumed, too."""


@dataclass(frozen=True, slots=True)
class RemoveAdapter(Job[None]):
    """Drop an adapter and its optimizer."""

    kind: ClassVar[str] = "remove_adapter"

    name: str


@dataclass(frozen=True, slots=True)
class SaveAdapter(Job[None]):
    """Write an adapter as PEFT's files, beside its optimizer's state if that is wanted."""

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
    """Do what several jobs do, each of another adapter, in one call to the ranks. See `Role.together`.

    Result: what each job's would be, or the error that it would fail with. It is no job of a file: its parts are.
    """

    kind: ClassVar[str] = "joint"

    parts: tuple[ForwardBackward | OptimStep, ...]
    """No loss of them is named by ``RoleSpec.losses``."""


@dataclass(frozen=True, slots=True)
class DropGradient(Job[None]):
    """Drop the gradients that were added up, with whatever failed among them: the mini-batch begins anew."""

    kind: ClassVar[str] = "drop_gradient"

    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class RlStep(Job[StepResult]):
    """Take one step of the runner's algorithm: advantages, forward, backward and optimizer, of every role that it trains."""

    kind: ClassVar[str] = "rl_step"

    batch: TokenBatch
    denominators: LossDenominators | None = None


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
    """Resume from a state that `Save` wrote, or begin anew from a Hugging Face directory. Result: the optimizer steps taken."""

    kind: ClassVar[str] = "load"

    directory: Path
    optimizer: bool = True
    """Whether moments and steps are resumed, too; otherwise training begins anew with the weights."""


@dataclass(frozen=True, slots=True)
class Export(Job[None]):
    """Write a Hugging Face model directory, adapters of ``trainer.lora`` added to the weights."""

    kind: ClassVar[str] = "export"

    directory: Path
    dtype: str
    """Such as ``bfloat16``."""


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
"""All kinds of jobs but for `JointJob`."""
