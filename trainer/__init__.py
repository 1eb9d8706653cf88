"""Training: engines that hold the model, objectives, and the fully-async loop around them.

Importing this package needs neither transformers nor Ray. The objective by itself:

    >>> import torch
    >>> from weightlane.trainer import group_advantages
    >>> group_advantages(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    tensor([[ 1.0000, -1.0000],
            [ 0.0000,  0.0000]])
"""

from typing import TYPE_CHECKING, Any

from .config import AlgorithmConfig, DataConfig, RewardConfig, TrainerConfig
from .data.batch import MicroBatch, MiniBatch, TokenBatch, TokenSequence
from .engines.contract import TrainingEngine
from .engines.registry import training_engine_class, training_engine_names
from .objectives.advantages import gae, group_advantages, whiten
from .objectives.dpo import dpo
from .objectives.loss import Loss, LossOutput, LossTerm, ModelOutputs, needs
from .objectives.named import Objective
from .objectives.reference_kl import kl_estimate, kl_penalised_rewards
from .objectives.supervised import sft
from .objectives.value import explained_variance, value_loss

if TYPE_CHECKING:
    from .engines.fsdp2.shards import shards_of

__all__ = [
    "AlgorithmConfig",
    "DataConfig",
    "Loss",
    "LossOutput",
    "LossTerm",
    "MicroBatch",
    "MiniBatch",
    "ModelOutputs",
    "Objective",
    "RewardConfig",
    "TokenBatch",
    "TokenSequence",
    "TrainerConfig",
    "TrainingEngine",
    "dpo",
    "explained_variance",
    "gae",
    "group_advantages",
    "kl_estimate",
    "kl_penalised_rewards",
    "needs",
    "sft",
    "shards_of",
    "training_engine_class",
    "training_engine_names",
    "value_loss",
    "whiten",
]


def __getattr__(name: str) -> Any:
    if name == "shards_of":  # torch's DTensor, which it needs, is slow to import
        from .engines.fsdp2.shards import shards_of  # noqa: PLC0415

        return shards_of
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
