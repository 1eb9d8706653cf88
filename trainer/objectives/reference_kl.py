"""KL divergence from a reference policy, estimated from sampled tokens: as a loss term, and as a penalty in rewards.

With ``x = log policy(token) - log reference(token)`` at a sampled token, the estimators of ``KL(policy || reference)`` are
(Schulman, "Approximating KL divergence", joschu.net/blog/kl-approx.html):

    k1 = x                    unbiased, of any sign
    k2 = x^2 / 2              biased, never negative
    k3 = exp(-x) - 1 + x      unbiased, never negative

The gradient of an estimate is not an estimate of the gradient, because the tokens are sampled from the policy, too.
For tokens that the policy itself sampled, and a given prefix, the expected gradient of each as a loss is:

    k1: zero. It adds only noise.
    k2: the gradient of KL(policy || reference), the reverse KL that RL with a KL penalty means.
    k3: the gradient of KL(reference || policy), the forward KL. It is GRPO's term (arXiv 2402.03300, equation 4).

In rewards it is the value that counts: k1 there gives, on average, the gradient of the reverse KL of full sequences. See
arXiv 2512.21852. Tokens of an older policy are treated as the policy's own: there are no importance weights here.
"""

from __future__ import annotations

import torch

from weightlane.ckpt_engines import ProtocolError

from ..data.sequences import MicroBatch
from .config import AlgorithmConfig, KlEstimator
from .loss import Loss, LossOutput, LossTerm, ModelOutputs
from .policy_values import LARGEST_LOG_RATIO, REFERENCE_LOGPROBS


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Estimate ``KL(policy || reference)`` from each sampled token, with gradient.

    Args:
        logprobs: float [N], of the policy.
        reference: float [N], of the reference policy.
        estimator: See this module.

    Returns:
        float [N]. In k3, the ratio reference / policy is bounded at e^20; a token beyond it has no gradient.
    """
    if estimator == "k1":
        return logprobs - reference
    if estimator == "k2":
        return (logprobs - reference).square() / 2
    drift = (reference - logprobs).clamp(max=LARGEST_LOG_RATIO)
    return torch.expm1(drift) - drift


def reference_kl(config: AlgorithmConfig) -> Loss:
    """The estimate ``kl_estimator`` at every target, times ``kl_coefficient``; a mean over tokens.

    Reads the per-token value `REFERENCE_LOGPROBS`; raises `ProtocolError` where a batch lacks it.

    Metrics: ``reference_kl``, by the estimator k3, whichever is the loss's.
    """

    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        logprobs = outputs.required("logprobs")[micro.mask]
        reference = micro.required(REFERENCE_LOGPROBS)[micro.mask]
        total = config.kl_coefficient * kl_estimate(logprobs, reference, config.kl_estimator).sum()
        metrics = {"reference_kl": kl_estimate(logprobs.detach(), reference, "k3").sum()}
        return LossOutput({"reference_kl": LossTerm(total)}, metrics)

    return loss


def kl_penalised_rewards(
    reward: float,
    logprobs: torch.Tensor,
    reference: torch.Tensor,
    *,
    coefficient: float,
    estimator: KlEstimator = "k1",
) -> torch.Tensor:
    """Return the rewards of one completion's tokens: a KL penalty for each, plus the completion's reward for the last.

    Source: arXiv 2203.02155.

    Args:
        reward: The completion's reward.
        logprobs: float [T], T at least 1: log-probability of each target under the policy that sampled it.
        reference: float [T], under the reference policy.
        coefficient: A token's reward is minus this times the estimate.
        estimator: See this module; k1 is the one that is correct on average.

    Returns:
        float32 [T] without gradient: the `rewards` of `gae`.

    Raises:
        ProtocolError: Shapes disagree, or there is no token.
    """
    if logprobs.ndim != 1 or logprobs.shape != reference.shape or not len(logprobs):
        raise ProtocolError(
            f"log-probabilities have shape {list(logprobs.shape)}, those of the reference {list(reference.shape)}.",
            part="rewards",
            hint="Give one of each for every target of one completion.",
        )
    rewards = -coefficient * kl_estimate(logprobs.detach(), reference.detach(), estimator)
    rewards[-1] += reward
    return rewards.float()
