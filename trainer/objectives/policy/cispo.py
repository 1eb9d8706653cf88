"""CISPO: importance weights are clipped, and no token loses its gradient."""

from __future__ import annotations

import torch

from ...config import AlgorithmConfig
from ...data.sequences import MicroBatch
from ..loss import Loss, LossOutput, LossTerm, ModelOutputs
from ..policy_values import ADVANTAGES, ROLLOUT_LOGPROBS, policy_metrics, ratio_of


def cispo(config: AlgorithmConfig) -> Loss:
    """Clipped importance sampling policy optimization (arXiv 2506.13585, equations 4 and 5); a mean over tokens.

    With ``r = exp(logprob - rollout_logprob)`` and advantage ``A``, per token, where ``stop`` stops the gradient:

        loss = -stop(clip(r, 1 - clip_low, 1 + clip_high)) * A * logprob

    Metrics: those of `policy_metrics`; ``clip_fraction`` counts clipped weights, although their gradient stays.
    """
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high

    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        logprobs, advantages = outputs.required("logprobs"), micro.required(ADVANTAGES)
        drift = torch.where(micro.mask, logprobs.detach() - micro.required(ROLLOUT_LOGPROBS), 0.0)
        ratio = ratio_of(drift)
        weights = ratio.clamp(low, high)
        per_token = torch.where(micro.mask, -weights * advantages * logprobs, 0.0)
        metrics = policy_metrics(logprobs, micro, ratio == weights, weights)
        return LossOutput({"policy": LossTerm(per_token.sum())}, metrics)

    return loss
