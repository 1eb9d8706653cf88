"""Settings of AdamW: `AdamParams` for one step, and the schedule of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import ConfigError

from ...config import TrainerConfig

MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's moments of a parameter, as torch names them."""
STEP = "step"
"""The number of a parameter's steps, as torch names it."""
Moments = Mapping[torch.Tensor, Mapping[str, torch.Tensor]]
"""AdamW's moments and step count, by torch's names for them, of each tensor that it steps."""


@dataclass(frozen=True, slots=True)
class AdamParams:
    """Settings of one step of AdamW."""

    learning_rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the two moment averages."""
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """L2 norm to which a larger gradient is scaled down; infinity for no clipping."""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for values that AdamW cannot step with."""
        finite = (self.learning_rate, self.eps, self.weight_decay)
        if not (
            all(0.0 <= value < math.inf for value in finite)
            and all(0.0 <= beta < 1.0 for beta in self.betas)
            and self.max_grad_norm > 0.0
        ):
            raise ConfigError(
                f"AdamW cannot step with {self}.",
                part="optimizer step",
                hint="Rates, eps and weight decay are finite and not negative, betas in [0, 1), max_grad_norm above 0.",
            )

    @classmethod
    def of(cls, config: TrainerConfig, step: int) -> AdamParams:
        """Return the settings in `config` for the step that follows `step` steps."""
        rate, most = learning_rate(config, step), config.max_grad_norm
        return cls(rate, config.betas, weight_decay=config.weight_decay, max_grad_norm=most)

    def set_in(self, optimizer: torch.optim.Optimizer) -> None:
        """Write these settings into `optimizer`: torch's AdamW, or one with its settings."""
        for group in optimizer.param_groups:
            group.update(lr=self.learning_rate, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay)


def learning_rate(config: TrainerConfig, step: int) -> float:
    """Return the learning rate of the step that follows `step` steps.

    It rises linearly over ``lr_warmup_steps``, then follows ``lr_schedule`` for ``lr_decay_steps`` down to ``lr_final_share`` of
    ``learning_rate``, where it stays.
    """
    if step < config.lr_warmup_steps:
        return config.learning_rate * (step + 1) / config.lr_warmup_steps
    if config.lr_schedule == "constant":
        return config.learning_rate
    done = min(1.0, (step - config.lr_warmup_steps) / config.lr_decay_steps)
    left = 1.0 - done if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return config.learning_rate * (config.lr_final_share + (1.0 - config.lr_final_share) * left)
