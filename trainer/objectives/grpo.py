"""GRPO with truncated importance sampling: the trust region and the correction for the rollout's policy are two things."""

from __future__ import annotations

import torch

from ..config import AlgorithmConfig
from ..data.batch import MicroBatch
from .loss import Loss, LossOutput, LossTerm, ModelOutputs
from .policy_values import ADVANTAGES, importance_weights, policy_metrics, proximal_logprobs, ratio_of


def grpo(config: AlgorithmConfig) -> Loss:
    """GRPO's clipped surrogate around proximal log-probabilities, weighted by importance; a mean over tokens.

    With ``r = exp(logprob - proximal)``, advantage ``A`` and the weight ``w`` of `importance_weights`, per token:

        loss = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    Sources: GRPO, arXiv 2402.03300, equation 3 (without the KL term); the asymmetric clip and the mean over tokens, DAPO,
    arXiv 2503.14476, equation 8; the trust region apart from the weight, decoupled PPO, arXiv 2110.00641, equation 2.

    Metrics: those of `policy_metrics`, and ``importance``, the mean weight.
    """
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high

    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        logprobs, advantages = outputs.required("logprobs"), micro.per_token[ADVANTAGES]
        proximal = proximal_logprobs(logprobs, micro, config)
        weights = importance_weights(proximal, micro, config)
        ratio = ratio_of(torch.where(micro.mask, logprobs - proximal, 0.0))
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
        per_token = torch.where(micro.mask, -weights * surrogate, 0.0)
        unclipped = torch.where(advantages > 0, ratio <= high, ratio >= low)
        metrics = policy_metrics(logprobs, micro, unclipped, ratio.detach())
        importance = torch.where(micro.mask, weights, 0.0).sum()
        return LossOutput({"policy": LossTerm(per_token.sum())}, {**metrics, "importance": importance})

    return loss
