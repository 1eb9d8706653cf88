"""`PassQuery`: the outputs that are requested of a single forward pass."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class PassQuery:
    """The wanted outputs of one forward pass over a packed micro-batch of N tokens, and the tokens they are wanted for."""

    rows: torch.Tensor
    """int64 [R]: the tokens for which log-probabilities, entropies and top-k are wanted."""
    logprobs: bool = True
    """Whether log-probabilities of the targets of `rows` are wanted."""
    entropy: bool = False
    top_k: int = 0
    """How many of the most probable tokens are wanted."""
    hidden: bool = False
    """Whether the hidden states, the head's input, of all N tokens are wanted."""
    logit_rows: torch.Tensor | None = None
    """int64 [L]: the tokens whose logits are wanted, over the full vocabulary; None for none."""

    @property
    def asks_head(self) -> bool:
        """Whether an output is wanted that `head_outputs` computes: log-probabilities, entropies or top-k."""
        return self.logprobs or self.entropy or self.top_k > 0

    def to(self, device: torch.device) -> PassQuery:
        """Return the same query with its tensors on `device`."""
        logit_rows = None if self.logit_rows is None else self.logit_rows.to(device)
        return replace(self, rows=self.rows.to(device), logit_rows=logit_rows)
