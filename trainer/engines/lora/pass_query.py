"""`PassQuery`: what a program that drives one rank asks of a single forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class PassQuery:
    """The outputs of one forward pass over a packed micro-batch of N tokens, and for which of these."""

    rows: torch.Tensor
    """int64 [R]: the tokens for which log-probabilities, entropies and top-k are wanted."""
    logprobs: bool = True
    """Whether log-probabilities of the targets of `rows` are wanted."""
    entropy: bool = False
    top_k: int = 0
    """How many of the most probable tokens are wanted."""
    hidden: bool = False
    """Whether what the head reads of all N tokens is wanted."""
    logit_rows: torch.Tensor | None = None
    """int64 [L]: the tokens whose logits are wanted, over the whole vocabulary; None for none."""

    @property
    def asks_head(self) -> bool:
        """Whether anything is wanted that is computed in chunks over the vocabulary."""
        return self.logprobs or self.entropy or self.top_k > 0

    def to(self, device: torch.device) -> PassQuery:
        """The same query with its tensors on `device`."""
        logit_rows = None if self.logit_rows is None else self.logit_rows.to(device)
        return replace(self, rows=self.rows.to(device), logit_rows=logit_rows)
