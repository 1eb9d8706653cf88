"""`PassQuery`: the outputs that are requested of a single forward pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Self

import torch

from ...data.sequences import MicroBatch
from ...objectives.loss import OutputName
from .outputs import head_outputs
from .terms import LogitTransform, VocabularyShare


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
    """int64 [L]: the tokens whose logits are wanted, over the full vocabulary, without temperature; None for none."""

    @classmethod
    def of_targets(cls, micro: MicroBatch, wanted: Collection[OutputName], top_k: int) -> Self:
        """Ask for the outputs `wanted`, for the tokens that have a target."""
        rows = micro.mask.nonzero().squeeze(1)
        return cls(rows, "logprobs" in wanted, "entropy" in wanted, top_k, "hidden" in wanted)

    @property
    def asks_head(self) -> bool:
        """Whether an output is wanted that `from_head` computes: log-probabilities, entropies or top-k."""
        return self.logprobs or self.entropy or self.top_k > 0

    def to(self, device: torch.device) -> Self:
        """Return the same query with its tensors on `device`."""
        logit_rows = None if self.logit_rows is None else self.logit_rows.to(device)
        return replace(self, rows=self.rows.to(device), logit_rows=logit_rows)

    def from_head(
        self,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        micro: MicroBatch,
        *,
        bias: torch.Tensor | None = None,
        transform: LogitTransform | None = None,
        share: VocabularyShare | None = None,
    ) -> dict[str, torch.Tensor]:
        """Compute the outputs for `rows` by `head_outputs`, by their names in `ModelOutputs`.

        Args:
            hidden: [R, width], the head's input for `rows`.
            weight: See `head_outputs`.
            micro: The micro-batch, for targets and temperatures.
            bias: See `head_outputs`.
            transform: See `head_outputs`.
            share: See `head_outputs`.
        """
        temperatures = micro.temperatures
        outputs = head_outputs(
            hidden,
            weight,
            micro.targets[self.rows],
            entropy=self.entropy,
            top_k=self.top_k,
            temperatures=None if temperatures is None else temperatures[self.rows],
            bias=bias,
            transform=transform,
            share=share,
        )
        found = {"logprobs": outputs.logprobs}
        if self.entropy:
            found["entropy"] = outputs.entropy
        if self.top_k:
            found |= {"top_tokens": outputs.top_tokens, "top_logprobs": outputs.top_logprobs}
        return found
