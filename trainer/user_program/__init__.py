"""User-written training programs under torchrun: every rank computes outputs with gradient, and steps adapters or weights.

>>> from weightlane.trainer.user_program import ForwardInput
>>> ForwardInput(input_tokens=[5, 7, 9], target_tokens=[7, 9, -100]).target_tokens
tensor([   7,    9, -100])
"""

from ..engines.optimizers.settings import AdamParams
from .inputs import UNSET, ForwardInput, ForwardInputs
from .outputs import ForwardOutput, ForwardOutputs, MicroBatch, MicroBatchStats, TopK
from .slots import BASE
from .trainer_rank import TrainerRank

__all__ = [
    "BASE",
    "UNSET",
    "AdamParams",
    "ForwardInput",
    "ForwardInputs",
    "ForwardOutput",
    "ForwardOutputs",
    "MicroBatch",
    "MicroBatchStats",
    "TopK",
    "TrainerRank",
]
