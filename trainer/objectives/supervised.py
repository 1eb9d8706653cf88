"""Supervised fine-tuning."""

from __future__ import annotations

import torch

from ..data.sequences import MicroBatch
from .loss import LossOutput, LossTerm, ModelOutputs

WEIGHTS = "weights"
"""Per-token value, optional: the weight of each target."""


def sft(outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
    """The negative log-likelihood of the targets, each times its weight if there are weights; a mean over targets."""
    logprobs = outputs.required("logprobs")
    weighted = logprobs * micro.per_token[WEIGHTS] if WEIGHTS in micro.per_token else logprobs
    return LossOutput({"nll": LossTerm(-torch.where(micro.mask, weighted, 0.0).sum())})
