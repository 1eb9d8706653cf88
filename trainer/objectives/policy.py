"""Losses of a policy, which ``[algorithm] objective`` names, and the entropy bonus that is added to any of them."""

from __future__ import annotations

import math

import torch

from ..data.sequences import MicroBatch
from .config import AlgorithmConfig
from .loss import Loss, LossOutput, LossTerm, ModelOutputs, needs
from .policy_values import (
    ADVANTAGES,
    ROLLOUT_LOGPROBS,
    importance_weights,
    policy_metrics,
    proximal_logprobs,
    ratio_of,
)


def dual_clip(config: AlgorithmConfig) -> Loss:
    """GRPO's objective with a second clip, against the rollout's own log-probabilities: the default.

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


def token_surrogate(config: AlgorithmConfig) -> Loss:
    """The loss ``grpo``, with advantages relative to a group, and ``ppo``, with one for each token; a mean over tokens.

    With ``r = exp(logprob - proximal)``, the token's advantage ``A`` and the weight ``w`` of `importance_weights`, per token:

        loss = -w * min(r * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    Sources: PPO, arXiv 1707.06347, equation 7; GRPO, arXiv 2402.03300, equation 3 (its KL term is `reference_kl`); the
    asymmetric clip and the mean over tokens, DAPO, arXiv 2503.14476, equation 8; the trust region apart from the weight,
    decoupled PPO, arXiv 2110.00641, equation 2. `value_loss` trains PPO's critic, a model of its own.

    Metrics: those of `policy_metrics`, and ``importance``, the mean weight.
    """

    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        logprobs, advantages = outputs.required("logprobs"), micro.required(ADVANTAGES)
        proximal = proximal_logprobs(logprobs, micro, config)
        weights = importance_weights(proximal, micro, config)
        ratio = ratio_of(torch.where(micro.mask, logprobs - proximal, 0.0))
        surrogate, unclipped = _clipped(ratio, advantages, config)
        per_token = torch.where(micro.mask, -weights * surrogate, 0.0)
        metrics = policy_metrics(logprobs, micro, unclipped, ratio.detach())
        importance = torch.where(micro.mask, weights, 0.0).sum()
        return LossOutput({"policy": LossTerm(per_token.sum())}, {**metrics, "importance": importance})

    return loss


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
        surrogate, unclipped = _clipped(ratio, mean(micro.required(ADVANTAGES)), config)
        metrics = policy_metrics(logprobs, micro, unclipped[micro.sequence_of], ratio.detach()[micro.sequence_of])
        importance = torch.where(mask, weights, 0.0).sum()
        term = LossTerm(-(mean(weights) * surrogate).sum(), "sequences")
        return LossOutput({"policy": term}, {**metrics, "importance": importance})

    return loss


def cispo(config: AlgorithmConfig) -> Loss:
    """Clipped importance sampling policy optimization (arXiv 2506.13585, equations 4 and 5); a mean over tokens.

    With ``r = exp(logprob - rollout_logprob)`` and advantage ``A``, per token, where ``stop`` stops the gradient:

        loss = -stop(clip(r, 1 - clip_low, 1 + clip_high)) * A * logprob

    No token loses its gradient. Metrics: those of `policy_metrics`; ``clip_fraction`` counts clipped weights.
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


def entropy_bonus(config: AlgorithmConfig) -> Loss:
    """The negative entropy of the policy at every target, times ``entropy_coefficient``; a mean over tokens.

    Source: PPO, arXiv 1707.06347, equation 9, whose ``c2`` is the coefficient. The entropy is exact, over the full vocabulary.
    """

    @needs("entropy")
    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        entropy = outputs.required("entropy")[micro.mask]
        return LossOutput({"entropy_bonus": LossTerm(-config.entropy_coefficient * entropy.sum())})

    return loss


def _clipped(
    ratio: torch.Tensor, advantages: torch.Tensor, config: AlgorithmConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute ``min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``; and, bool, where the clip did not remove the gradient."""
    low, high = 1.0 - config.clip_low, 1.0 + config.clip_high
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    return surrogate, torch.where(advantages > 0, ratio <= high, ratio >= low)
