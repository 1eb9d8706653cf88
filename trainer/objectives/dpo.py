"""Direct preference optimization: makes the chosen of two completions more probable relative to the rejected one."""

from __future__ import annotations

import torch
from torch.nn.functional import logsigmoid

from weightlane.ckpt_engines import ConfigError, ProtocolError

from ..data.sequences import MicroBatch
from .loss import Loss, LossOutput, LossTerm, ModelOutputs
from .policy_values import REFERENCE_LOGPROBS

_PART = "objective dpo"


def dpo(*, beta: float = 0.1, label_smoothing: float = 0.0) -> Loss:
    """The loss of direct preference optimization (arXiv 2305.18290, equation 7); a mean over pairs.

    Sequences come in pairs, the chosen one first: ``TokenBatch(sequences, sequences_per_unit=2)``. With the implicit reward
    ``beta * sum over the targets of (logprob - reference)`` of each, the margin ``m`` of the chosen over the rejected one, and
    the share ``e`` of wrong labels (`label_smoothing`, conservative DPO, ericmitchell.ai/cdpo.pdf), per pair:

        loss = -(1 - e) * log sigmoid(m) - e * log sigmoid(-m)

    A mini-batch of S sequences has S / 2 pairs, so the term is twice the sum, as a mean over sequences. A pair without any
    target counts as 0. Reads the per-token value `REFERENCE_LOGPROBS`.

    Metrics, means over pairs: ``reward_margin``; ``reward_accuracy``, pairs with a margin above 0; ``reward_chosen`` and
    ``reward_rejected``.

    Args:
        beta: Above 0; the strength of the constraint to the reference policy.
        label_smoothing: At least 0, below 0.5.

    Raises:
        ConfigError: A number is out of its range. The loss itself raises `ProtocolError` for a batch that is not in pairs, or
            that lacks the value.
    """
    if not beta > 0.0 or not 0.0 <= label_smoothing < 0.5:  # noqa: PLR2004 - more wrong labels than right ones
        raise ConfigError(
            f"beta is {beta} and label_smoothing {label_smoothing}.",
            part=_PART,
            hint="beta is above 0; label_smoothing is at least 0 and below 0.5.",
        )

    def loss(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        if micro.sequences_per_unit != 2:  # noqa: PLR2004 - a pair
            raise ProtocolError(
                f"sequences come in groups of {micro.sequences_per_unit}, where dpo compares pairs.",
                part=_PART,
                hint="Make the batch by TokenBatch(sequences, sequences_per_unit=2), each chosen one before the rejected one.",
            )
        gained = outputs.required("logprobs") - micro.required(REFERENCE_LOGPROBS)
        rewards = beta * micro.sum_by_sequence(torch.where(micro.mask, gained, 0.0)).view(-1, 2)
        counted = micro.sum_by_sequence(micro.mask.float()).view(-1, 2).sum(1) > 0
        chosen, rejected = rewards[counted].unbind(1)
        margin = chosen - rejected
        losses = -(1.0 - label_smoothing) * logsigmoid(margin) - label_smoothing * logsigmoid(-margin)

        def mean(values: torch.Tensor) -> LossTerm:
            return LossTerm(2.0 * values.sum(), "sequences")

        metrics = {
            "reward_margin": mean(margin.detach()),
            "reward_accuracy": mean((margin.detach() > 0).to(margin.dtype)),
            "reward_chosen": mean(chosen.detach()),
            "reward_rejected": mean(rejected.detach()),
        }
        return LossOutput({"dpo": mean(losses)}, metrics)

    return loss
