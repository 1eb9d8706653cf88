"""Training: engines that hold the model, objectives, and the fully-async loop around them.

Importing this package needs neither transformers nor Ray. The objective by itself:

    >>> import torch
    >>> from weightlane.trainer import group_advantages
    >>> group_advantages(torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    tensor([[ 1.0000, -1.0000],
            [ 0.0000,  0.0000]])
"""

import importlib
from typing import TYPE_CHECKING, Any

from .config import DataConfig, LoraConfig, RewardConfig, TrainerConfig
from .data.batch import LossDenominators, MiniBatch, TokenBatch
from .data.sequences import IGNORED, MicroBatch, TokenSequence
from .engines.contract import TrainingEngine
from .engines.optimizers.settings import AdamParams
from .engines.registry import training_engine_class
from .objectives.advantages import gae, group_advantages, whiten
from .objectives.config import AlgorithmConfig
from .objectives.dpo import dpo
from .objectives.loss import Loss, LossOutput, LossTerm, ModelOutputs, needs
from .objectives.named import Objective
from .objectives.named_advantages import Advantages, ScoredGroup
from .objectives.reference_kl import kl_estimate, kl_penalised_rewards
from .objectives.supervised import sft
from .objectives.value import explained_variance, value_loss

if TYPE_CHECKING:
    from .algorithms.step import dpo_step, take_step
    from .dispatch.dispatch import WorkerDispatch
    from .dispatch.ranks import LocalRanks
    from .dispatch.ray_ranks import RayRanks
    from .dispatch.role import Role
    from .dispatch.role_spec import RoleSpec
    from .engines.fsdp2.shards import shards_of

_SLOW = {
    "LocalRanks": ".dispatch.ranks",
    "RayRanks": ".dispatch.ray_ranks",
    "Role": ".dispatch.role",
    "RoleSpec": ".dispatch.role_spec",
    "WorkerDispatch": ".dispatch.dispatch",
    "dpo_step": ".algorithms.step",
    "shards_of": ".engines.fsdp2.shards",
    "take_step": ".algorithms.step",
}
"""The module of each name whose import is slow."""

__all__ = [
    "IGNORED",
    "AdamParams",
    "Advantages",
    "AlgorithmConfig",
    "DataConfig",
    "LocalRanks",
    "LoraConfig",
    "Loss",
    "LossDenominators",
    "LossOutput",
    "LossTerm",
    "MicroBatch",
    "MiniBatch",
    "ModelOutputs",
    "Objective",
    "RayRanks",
    "RewardConfig",
    "Role",
    "RoleSpec",
    "ScoredGroup",
    "TokenBatch",
    "TokenSequence",
    "TrainerConfig",
    "TrainingEngine",
    "WorkerDispatch",
    "dpo",
    "dpo_step",
    "explained_variance",
    "gae",
    "group_advantages",
    "kl_estimate",
    "kl_penalised_rewards",
    "needs",
    "sft",
    "shards_of",
    "take_step",
    "training_engine_class",
    "value_loss",
    "whiten",
]


def __getattr__(name: str) -> Any:
    if name in _SLOW:
        return getattr(importlib.import_module(_SLOW[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
