"""PPO: every token has an advantage of its own."""

from __future__ import annotations

from ...config import AlgorithmConfig
from ..loss import Loss
from .surrogate import token_surrogate


def ppo(config: AlgorithmConfig) -> Loss:
    """PPO's policy loss: `token_surrogate` with an advantage for each token, for example that of `gae`.

    Sources: the clipped surrogate, PPO, arXiv 1707.06347, equation 7; samples of an older policy, decoupled PPO, arXiv
    2110.00641, equation 2. `value_loss` trains the critic, a model of its own. The entropy bonus of PPO's equation 9 is
    `entropy_bonus`, which `Objective` adds to any policy's loss.
    """
    return token_surrogate(config)
