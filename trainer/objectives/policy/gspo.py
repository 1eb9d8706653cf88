"""GSPO: ratio and clip are computed per sequence."""

from __future__ import annotations

import torch

from ...config import AlgorithmConfig
from ...data.sequences import MicroBatch
from ..loss import Loss, LossOutput, LossTerm, ModelOutputs
from ..policy_values import ADVANTAGES, importance_weights, policy_metrics, proximal_logprobs, ratio_of
from .surrogate import clipped


def gspo(config: AlgorithmConfig) -> Loss:
    """Group sequence policy optimization (arXiv 2507.18071, equations 5 and 7); a mean over sequences.

    With ``s = exp(mean over the sequence's tokens of (logprob - proximal))``, advantage ``A`` and the weight ``w`` of
    `importance_weights` (its mean over the sequence), per sequence:

        loss = -w * min(s * A, clip(s, 1 - clip_low, 1 + clip_high) * A)

    Ratios of sequences are close to 1: the paper clips at 3e-4 below and 4e-4 above.

    Metrics: those of `policy_metrics`, where ``ratio`` is that of the sequence, and ``importance``, the mean weight.
    """

    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        logprobs, mask = outputs.required("logprobs"), micro.mask
        proximal = proximal_logprobs(logprobs, micro, config)
        targets = micro.sum_by_sequence(mask.float()).clamp(min=1.0)

        def mean(values: torch.Tensor) -> torch.Tensor:
            return micro.sum_by_sequence(torch.where(mask, values, 0.0)) / targets

        weights = importance_weights(proximal, micro, config)
        ratio = ratio_of(mean(logprobs - proximal))
        surrogate, unclipped = clipped(ratio, mean(micro.required(ADVANTAGES)), config)
        metrics = policy_metrics(logprobs, micro, unclipped[micro.sequence_of], ratio.detach()[micro.sequence_of])
        importance = torch.where(mask, weights, 0.0).sum()
        term = LossTerm(-(mean(weights) * surrogate).sum(), "sequences")
        return LossOutput({"policy": term}, {**metrics, "importance": importance})

    return loss
