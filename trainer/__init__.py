"""Training: engines that hold the model, GRPO, and the fully-async loop around them.

Importing this package needs neither transformers nor Ray. The objective by itself:

    >>> import torch
    >>> from weightlane.trainer import group_advantages
    >>> group_advantages(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    tensor([[ 1.0000, -1.0000],
            [ 0.0000,  0.0000]])
"""

from .batch import MicroBatch, Sample, TrainBatch
from .config import AlgorithmConfig, DataConfig, RewardConfig, TrainerConfig
from .engine import TrainingEngine
from .losses import LossFn, LossOutput, group_advantages, grpo_loss, sft_loss
from .registry import training_engine_class, training_engine_names

__all__ = [
    "AlgorithmConfig",
    "DataConfig",
    "LossFn",
    "LossOutput",
    "MicroBatch",
    "RewardConfig",
    "Sample",
    "TrainBatch",
    "TrainerConfig",
    "TrainingEngine",
    "group_advantages",
    "grpo_loss",
    "sft_loss",
    "training_engine_class",
    "training_engine_names",
]
