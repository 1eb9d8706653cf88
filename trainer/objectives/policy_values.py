"""The named values that policy-gradient objectives read, quantities derived from them, and the metrics they all report."""

from __future__ import annotations

import math

import torch

from ..data.sequences import MicroBatch
from .config import AlgorithmConfig

ROLLOUT_LOGPROBS = "rollout_logprobs"
"""Per-token value: log-probability of the target under the policy that sampled it, at the sampling temperature."""
ADVANTAGES = "advantages"
"""Per-token value: how much better than expected the target was."""
PROXIMAL_LOGPROBS = "proximal_logprobs"
"""Per-token value, optional: log-probability of the target under the policy that the trust region is around."""
TRAINER_LOGPROBS = "trainer_logprobs"
"""Per-token value, optional: log-probability of the target under the policy before the first step on a batch of several steps."""
REWARD = "reward"
"""Per-sequence value: the reward of the completion."""
REFERENCE_LOGPROBS = "reference_logprobs"
"""Per-token value: log-probability of the target under the reference policy of a KL term or of DPO."""

LARGEST_LOG_RATIO = 20.0
"""Bound of a log ratio: beyond it, the exponential would be too large for a useful gradient or estimate."""


def ratio_of(log_ratio: torch.Tensor) -> torch.Tensor:
    """Return the ratio, bounded so that it never overflows."""
    return torch.exp(log_ratio.clamp(max=LARGEST_LOG_RATIO))


def proximal_logprobs(logprobs: torch.Tensor, micro: MicroBatch, config: AlgorithmConfig) -> torch.Tensor:
    """Return the log-probabilities under the policy that the trust region is around: float32 [N] without gradient.

    These are the ones in the batch if it has `PROXIMAL_LOGPROBS`. Else they are the rollout's, or, with
    ``AlgorithmConfig.proximal = "trainer"``, those of the parameters before the step: `logprobs` without gradient.
    """
    if PROXIMAL_LOGPROBS in micro.per_token:
        return micro.per_token[PROXIMAL_LOGPROBS]
    return micro.required(ROLLOUT_LOGPROBS) if config.proximal == "rollout" else logprobs.detach()


def importance_weights(proximal: torch.Tensor, micro: MicroBatch, config: AlgorithmConfig) -> torch.Tensor:
    """Return the truncated ratio of a target's probability in the trainer to that in the rollout: float32 [N], no gradient.

    ``min(exp(proximal - rollout), importance_cap)`` for each token, or, with ``importance_level = "sequence"``, the same of the
    sums over a sequence. Truncated importance sampling, as in IMPALA (arXiv 1802.01561, section 4.1, the weight rho); it is 1
    where the trust region is around the rollout's policy.
    """
    log_ratio = torch.where(micro.mask, proximal - micro.required(ROLLOUT_LOGPROBS), 0.0)
    if config.importance_level == "sequence":
        log_ratio = micro.sum_by_sequence(log_ratio)[micro.sequence_of]
    return torch.exp(log_ratio.clamp(max=math.log(config.importance_cap)))


def mismatched(logprobs: torch.Tensor, micro: MicroBatch, config: AlgorithmConfig) -> torch.Tensor:
    """Return the targets that ``AlgorithmConfig.mismatch_mask`` leaves out of the loss: bool [N].

    Masked importance sampling by token, as in IcePop (arXiv 2510.18855, section 3.3), or by the geometric mean of a completion.
    The trainer's log-probabilities are those of `PROXIMAL_LOGPROBS` or `TRAINER_LOGPROBS`, or else, where a batch takes one step,
    `logprobs`, float32 [N].
    """
    known = (micro.per_token[name] for name in (PROXIMAL_LOGPROBS, TRAINER_LOGPROBS) if name in micro.per_token)
    trainer = next(known, logprobs.detach())
    log_ratio = torch.where(micro.mask, trainer - micro.required(ROLLOUT_LOGPROBS), 0.0)
    if config.mismatch_mask == "sequence":
        targets = micro.sum_by_sequence(micro.mask.float()).clamp(min=1.0)
        log_ratio = (micro.sum_by_sequence(log_ratio) / targets)[micro.sequence_of]
    low = math.log(config.mismatch_low) if config.mismatch_low else -math.inf
    return micro.mask & ((log_ratio < low) | (log_ratio > math.log(config.mismatch_high)))


def policy_metrics(
    logprobs: torch.Tensor, micro: MicroBatch, unclipped: torch.Tensor, ratio: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the metrics of a policy's objective, each a sum over targets.

    Args:
        logprobs: float32 [N].
        micro: the micro-batch.
        unclipped: bool [N]: where no clip removed the gradient.
        ratio: float32 [N]: the ratio that the objective clips.

    Returns:
        ``ratio``; ``clip_fraction``, targets with an advantage whose gradient a clip removed; ``approx_kl``, from the rollout to
        the policy by Schulman's estimator k3, ``r - 1 - log r``; and ``entropy``, by the estimate ``-logprob``.
    """
    with torch.no_grad():
        mask, advantages = micro.mask, micro.required(ADVANTAGES)
        drift = torch.where(mask, logprobs - micro.required(ROLLOUT_LOGPROBS), 0.0)
        drift = drift.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        return {
            "ratio": torch.where(mask, ratio, 0.0).sum(),
            "clip_fraction": (mask & ~unclipped & (advantages != 0)).sum().float(),
            "approx_kl": (torch.exp(drift) - 1.0 - drift).sum(),
            "entropy": torch.where(mask, -logprobs, 0.0).sum(),
        }
