"""GRPO with truncated importance sampling: the trust region and the correction for the rollout's policy are separate."""

from __future__ import annotations

from ...config import AlgorithmConfig
from ..loss import Loss
from .surrogate import token_surrogate


def grpo(config: AlgorithmConfig) -> Loss:
    """GRPO's loss: `token_surrogate` with advantages relative to a group (`group_advantages`).

    Sources: GRPO, arXiv 2402.03300, equation 3 (its KL term is `reference_kl`); the asymmetric clip and the mean over tokens,
    DAPO, arXiv 2503.14476, equation 8; the trust region apart from the weight, decoupled PPO, arXiv 2110.00641, equation 2.
    """
    return token_surrogate(config)
