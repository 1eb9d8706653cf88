"""Objectives over per-token log-probabilities, and the advantages they use.

Every loss is a *sum* over the tokens of a micro batch; the training engine divides by the number of loss tokens in the whole
step, over all ranks and micro batches. The result is the token mean that DAPO (arXiv 2503.14476, section 3.3) argues for,
and it does not depend on how the batch was split.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from ..config import AlgorithmConfig
from ..data.batch import MicroBatch

_STD_FLOOR = 1e-6


@dataclass(frozen=True, slots=True)
class LossOutput:
    """The result of a loss over one micro batch."""

    loss_sum: torch.Tensor
    """Scalar with gradient: the sum over loss tokens."""
    metric_sums: dict[str, torch.Tensor]
    """Scalars without gradient, each a sum over loss tokens; the same keys for every micro batch."""


class LossFn(Protocol):
    """An objective as the training engine calls it."""

    def __call__(self, logprobs: torch.Tensor, micro: MicroBatch) -> LossOutput:
        """Compute the loss of one micro batch.

        Args:
            logprobs: float32 [batch, targets] with gradient: the policy's log-probability of each target token, at the
                sampling temperature. Entries outside ``micro.loss_mask`` are finite and mean nothing.
            micro: the micro batch those targets belong to.
        """


def token_logprobs(logits: torch.Tensor, targets: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """Log-probability of `targets` under ``softmax(logits / temperature)``, computed in float32.

    Args:
        logits: [batch, positions, vocabulary], any floating dtype.
        targets: int64 [batch, positions].
        temperature: the sampling temperature of the rollout.

    Returns:
        float32 [batch, positions].
    """
    logits = logits.float()
    if temperature != 1.0:
        logits = logits / temperature
    return torch.log_softmax(logits, dim=-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def grpo_loss(config: AlgorithmConfig) -> LossFn:
    """GRPO's objective as a dual-clip surrogate, against the rollout's own log-probabilities.

    With ``r = exp(logprob - rollout_logprob)`` and advantage ``A``, per token:

        loss = -min(min(r, ratio_cap) * A, clip(r, 1 - clip_low, 1 + clip_high) * A)

    The ratio is taken to the policy that generated the token, whatever its version: stale samples are corrected as far as the
    clips allow, and no further. Sources: GRPO, arXiv 2402.03300, equation 3 (without the KL term); the asymmetric clip, DAPO,
    arXiv 2503.14476, equation 8; the dual clip, arXiv 1912.09729, equation 5, whose constant is `ratio_cap`. The second clip
    matters where ``A < 0`` and ``r`` is large, the one case that the first leaves unbounded: it bounds the loss there and ends
    the gradient. That is not the truncated importance weight of V-trace or IMPALA, which goes on weighing such a token.

    Everything is evaluated in log space (``min(r, c) = exp(min(log r, log c))``), so a large ratio never overflows.

    Metrics: ``ratio`` (truncated at `ratio_cap`), ``clip_fraction`` (tokens whose gradient one of the clips removed),
    ``approx_kl`` (rollout to policy, Schulman's k3 estimator ``r - 1 - log r``), ``entropy`` (the estimate ``-logprob``).
    """
    log_low, log_high, log_cap = (
        math.log(bound) for bound in (1.0 - config.clip_low, 1.0 + config.clip_high, config.ratio_cap)
    )

    def loss(logprobs: torch.Tensor, micro: MicroBatch) -> LossOutput:
        mask, advantages = micro.loss_mask, micro.advantages
        log_ratio = torch.where(mask, logprobs - micro.rollout_logprobs, 0.0)
        capped = torch.exp(log_ratio.clamp(max=log_cap)) * advantages
        clipped = torch.exp(log_ratio.clamp(min=log_low, max=log_high)) * advantages
        per_token = torch.where(mask, -torch.minimum(capped, clipped), 0.0)
        with torch.no_grad():
            detached = log_ratio.detach()
            no_gradient = torch.where(
                advantages > 0, detached > log_high, (detached < log_low) | (detached > log_cap)
            ) & (advantages != 0)
            bounded = detached.clamp(-20.0, 20.0)
            sums = {
                "ratio": torch.where(mask, torch.exp(detached.clamp(max=log_cap)), 0.0).sum(),
                "clip_fraction": (mask & no_gradient).sum().float(),
                "approx_kl": (torch.exp(bounded) - 1.0 - bounded).sum(),
                "entropy": torch.where(mask, -logprobs.detach(), 0.0).sum(),
            }
        return LossOutput(per_token.sum(), sums)

    return loss


def sft_loss() -> LossFn:
    """Supervised fine-tuning: the negative log-likelihood of the completion tokens. No metrics beyond the loss."""

    def loss(logprobs: torch.Tensor, micro: MicroBatch) -> LossOutput:
        return LossOutput(torch.where(micro.loss_mask, -logprobs, 0.0).sum(), {})

    return loss


def group_advantages(rewards: torch.Tensor, *, normalize_std: bool = True) -> torch.Tensor:
    """Advantages of completions relative to their group (GRPO, arXiv 2402.03300, section 4.1.2).

    ``A = (reward - mean) / (std + 1e-6)`` within a group, with the population standard deviation; without `normalize_std`
    the division is left out (Dr. GRPO, arXiv 2503.20783). A group whose rewards are all equal gets zeros.

    Args:
        rewards: [groups, group_size], finite.
        normalize_std: whether to divide by the group's standard deviation.

    Returns:
        float32 [groups, group_size].
    """
    rewards = rewards.double()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    # The mean of equal numbers can differ from them in the last bit, which the division would blow up.
    centred = torch.where(rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True), 0.0, centred)
    if normalize_std:
        centred = centred / (centred.square().mean(dim=1, keepdim=True).sqrt() + _STD_FLOOR)
    return centred.float()
