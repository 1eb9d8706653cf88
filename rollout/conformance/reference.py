"""The oracle of the checks: plain transformers in float32, loaded from a version's files, one forward pass without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..contract.requests import Sampling


class Reference:
    """The model in a checkpoint directory."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an extra

        self._model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.no_grad()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Compute the logits after each of `ids`, float64 [tokens, vocabulary]."""
        logits: torch.Tensor = self._model(torch.tensor([list(ids)]), use_cache=False).logits
        return logits[0].double()

    def distributions(self, prompt: Sequence[int], tokens: Sequence[int], sampling: Sampling) -> torch.Tensor:
        """Compute the log-probabilities that `sampling` draws each of `tokens` from, float64 [tokens, vocabulary].

        Tokens that it cannot draw have minus infinity.
        """
        logits = self.logits([*prompt, *tokens])[len(prompt) - 1 : -1]
        return torch.stack([_distribution(row, sampling) for row in logits])


def _distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """The log-probabilities of one next token: temperature first, then `top_k`, then `top_p` of what is left."""
    if sampling.greedy:
        return logits.log_softmax(-1)
    order = (logits / sampling.temperature).sort(descending=True)
    kept = order.values.clone()
    if sampling.top_k:
        kept[sampling.top_k :] = -torch.inf
    probabilities = kept.softmax(-1)
    kept[probabilities.cumsum(-1) - probabilities >= sampling.top_p] = -torch.inf
    return torch.full_like(logits, -torch.inf).scatter(0, order.indices, kept.log_softmax(-1))
