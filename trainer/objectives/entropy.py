"""The entropy bonus: keeps a policy from becoming deterministic too early."""

from __future__ import annotations

from ..config import AlgorithmConfig
from ..data.sequences import MicroBatch
from .loss import Loss, LossOutput, LossTerm, ModelOutputs, needs


def entropy_bonus(config: AlgorithmConfig) -> Loss:
    """The negative entropy of the policy at every target, times ``entropy_coefficient``; a mean over tokens.

    Source: PPO, arXiv 1707.06347, equation 9, whose ``c2`` is the coefficient. The entropy is exact, over the full vocabulary.
    """

    @needs("entropy")
    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        entropy = outputs.required("entropy")[micro.mask]
        return LossOutput({"entropy_bonus": LossTerm(-config.entropy_coefficient * entropy.sum())})

    return loss
