"""The clipped surrogate that GRPO, PPO and GSPO share."""

from __future__ import annotations

import torch

from ...config import AlgorithmConfig
from ...data.sequences import MicroBatch
from ..loss import Loss, LossOutput, LossTerm, ModelOutputs
from ..policy_values import ADVANTAGES, importance_weights, policy_metrics, proximal_logprobs, ratio_of


def clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` from ratios and advantages, float32 [N] each.

    Returns:
        float32 [N], with gradient; and bool [N]: where the clip did not remove the gradient.
    """
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return surrogate, torch.where(advantages > 0, ratio <= high, ratio >= low)


def token_surrogate(config: AlgorithmConfig) -> Loss:
    """The clipped surrogate of every token, weighted by importance; a mean over tokens.

    With ``r = exp(logprob - proximal)``, the token's advantage ``A`` and the weight ``w`` of `importance_weights`, per token:

        loss = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    Metrics: those of `policy_metrics`, and ``importance``, the mean weight.
    """

    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        logprobs, advantages = outputs.required("logprobs"), micro.required(ADVANTAGES)
        proximal = proximal_logprobs(logprobs, micro, config)
        weights = importance_weights(proximal, micro, config)
        ratio = ratio_of(torch.where(micro.mask, logprobs - proximal, 0.0))
        surrogate, unclipped = clipped(ratio, advantages, config)
        per_token = torch.where(micro.mask, -weights * surrogate, 0.0)
        metrics = policy_metrics(logprobs, micro, unclipped, ratio.detach())
        importance = torch.where(micro.mask, weights, 0.0).sum()
        return LossOutput({"policy": LossTerm(per_token.sum())}, {**metrics, "importance": importance})

    return loss
