"""The dual-clip surrogate: the default objective of `weightlane train`."""

from __future__ import annotations

import math

import torch

from ...config import AlgorithmConfig
from ...data.sequences import MicroBatch
from ..loss import Loss, LossOutput, LossTerm, ModelOutputs
from ..policy_values import ADVANTAGES, ROLLOUT_LOGPROBS, policy_metrics


def dual_clip(config: AlgorithmConfig) -> Loss:
    """GRPO's objective with a second clip, against the rollout's own log-probabilities.

    With ``r = exp(logprob - rollout_logprob)`` and advantage ``A``, per token:

        loss = -min(min(r, ratio_cap) * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    The ratio is taken to the policy that generated the token, whatever its version: stale samples are corrected as far as the
    clips allow, and no further. Sources: GRPO, arXiv 2402.03300, equation 3 (without the KL term); the asymmetric clip, DAPO,
    arXiv 2503.14476, equation 8; the dual clip, arXiv 1912.09729, equation 5, whose constant is `ratio_cap`. The second clip
    matters where ``A < 0`` and ``r`` is large, the one case that the first leaves unbounded: it bounds the loss there and
    removes the gradient. Unlike it, the truncated importance weight of V-trace or IMPALA keeps the gradient of such a token.

    Everything is evaluated in log space (``min(r, c) = exp(min(log r, log c))``), so a large ratio never overflows.

    Metrics: those of `policy_metrics`; ``ratio`` is truncated at `ratio_cap`.
    """
    log_low, log_high, log_cap = (
        math.log(bound) for bound in (1.0 - config.clip_low, 1.0 + config.clip_high, config.ratio_cap)
    )

    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        logprobs, advantages, mask = outputs.required("logprobs"), micro.required(ADVANTAGES), micro.mask
        log_ratio = torch.where(mask, logprobs - micro.required(ROLLOUT_LOGPROBS), 0.0)
        capped = torch.exp(log_ratio.clamp(max=log_cap)) * advantages
        clipped = torch.exp(log_ratio.clamp(min=log_low, max=log_high)) * advantages
        per_token = torch.where(mask, -torch.minimum(capped, clipped), 0.0)
        detached = log_ratio.detach()
        unclipped = torch.where(advantages > 0, detached <= log_high, (detached >= log_low) & (detached <= log_cap))
        metrics = policy_metrics(logprobs, micro, unclipped, torch.exp(detached.clamp(max=log_cap)))
        return LossOutput({"policy": LossTerm(per_token.sum())}, metrics)

    return loss
