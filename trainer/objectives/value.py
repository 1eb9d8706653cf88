"""The loss of a critic, which predicts returns."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ..data.sequences import MicroBatch
from .config import AlgorithmConfig
from .loss import Loss, LossOutput, LossTerm, ModelOutputs, needs

RETURNS = "returns"
"""Per-token value: the return that the critic should have predicted before the target; see `gae`."""
OLD_VALUES = "old_values"
"""Per-token value: the critic's prediction before the first step on this batch. Read only if ``value_clip`` is set."""


def value_loss(config: AlgorithmConfig) -> Loss:
    """Half the squared error of a critic's values, clipped around older values; a mean over tokens.

    With value ``V``, return ``R``, older value ``O`` and ``c = value_clip``, per token:

        loss = max((V - R)^2, (O + clip(V - O, -c, c) - R)^2) / 2

    Without ``value_clip`` it is ``(V - R)^2 / 2``. The clip is that of OpenAI's implementation of PPO (``ppo2`` of its
    Baselines); the paper, arXiv 1707.06347, equation 9, has only the squared error.

    Reads the per-token values `RETURNS` and, with a clip, `OLD_VALUES`; raises `ProtocolError` where a batch lacks one.

    Metrics: ``value``; ``return``; ``value_clip_fraction``, targets whose gradient the clip removed; and ``value_error``
    (``R - V``), ``value_error_square`` and ``return_square``, from which `explained_variance` is computed.
    """
    limit = config.value_clip

    @needs("values")
    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        values, returns = outputs.required("values")[micro.mask], micro.required(RETURNS)[micro.mask]
        squares = (values - returns).square()
        stopped = torch.zeros_like(values, dtype=torch.bool)
        if limit is not None:
            old = micro.required(OLD_VALUES)[micro.mask]
            bounded = (old + (values - old).clamp(-limit, limit) - returns).square()
            stopped = (bounded > squares) & ((values - old).abs() > limit)
            squares = torch.maximum(squares, bounded)
        exact, wanted = values.detach().double(), returns.double()
        metrics = {
            "value": exact.sum(),
            "return": wanted.sum(),
            "value_clip_fraction": stopped.sum().float(),
            "value_error": (wanted - exact).sum(),
            "value_error_square": (wanted - exact).square().sum(),
            "return_square": wanted.square().sum(),
        }
        return LossOutput({"value": LossTerm(squares.sum() / 2)}, metrics)

    return loss


def explained_variance(metrics: Mapping[str, float]) -> float:
    """Return the share of the returns' variance that a critic's values explain: ``1 - Var(R - V) / Var(R)``.

    Args:
        metrics: Means over targets, as `value_loss` names them, of one batch or averaged over several.

    Returns:
        At most 1. NaN if all returns are equal.
    """
    spread = metrics["return_square"] - metrics["return"] ** 2
    left = metrics["value_error_square"] - metrics["value_error"] ** 2
    return 1.0 - left / spread if spread > 0.0 else float("nan")
