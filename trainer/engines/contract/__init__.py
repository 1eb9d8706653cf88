"""The training engine contract: `TrainingEngine`, `AdapterEngine` for engines with adapters, and the calls of a step as data."""

from .adapters import AdapterEngine, with_adapters
from .calls import BackwardAnswer, ForwardBackward, Job, OptimStep
from .engine import STATE_PARTS, BackwardResult, Fence, SequenceOutputs, StatePart, TrainingEngine

__all__ = [
    "STATE_PARTS",
    "AdapterEngine",
    "BackwardAnswer",
    "BackwardResult",
    "Fence",
    "ForwardBackward",
    "Job",
    "OptimStep",
    "SequenceOutputs",
    "StatePart",
    "TrainingEngine",
    "with_adapters",
]
