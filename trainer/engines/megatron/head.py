"""The head of a model in megatron-core, for logits or values. The last pipeline stage returns the head's input."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
)

from ..head import PassQuery, VocabularyShare
from ..hf.heads import HeadQuery
from .weights import unwrapped


class ValueHead(torch.nn.Module):
    """A critic's head, in the place of `head` over the vocabulary: replicated on every tensor parallel rank, zeros at first."""

    def __init__(self, head: ColumnParallelLinear) -> None:
        super().__init__()
        like = head.weight
        self.weight = torch.nn.Parameter(torch.zeros(1, like.shape[1], dtype=like.dtype, device=like.device))
        self.bias = torch.nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device))

    def values(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute float32 values [tokens] from `hidden` [tokens, width]."""
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), self.bias.float()).squeeze(1)


def prepared_head(head: ColumnParallelLinear, *, valued: bool) -> torch.nn.Module:
    """Return `head`, or if `valued` a critic's, with a forward that returns its own input; `head_answer` computes outputs."""

    def forward(hidden: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        # Backward, both sum the gradient over the ranks' rows of the head.
        if head.sequence_parallel:
            return gather_from_sequence_parallel_region(hidden, group=head.tp_group), None
        return copy_to_tensor_model_parallel_region(hidden, group=head.tp_group), None

    chosen = ValueHead(head) if valued else head
    chosen.forward = forward
    return chosen


def head_of(chunk: torch.nn.Module) -> torch.Tensor | ValueHead:
    """Return the head in a chunk of the last pipeline stage: this rank's rows [local vocabulary, width], or a critic's head."""
    model = unwrapped(chunk)
    if isinstance(head := model.output_layer, ValueHead):
        return head
    tied = model.share_embeddings_and_output_weights
    weight: torch.Tensor = model.shared_embedding_or_output_weight() if tied else head.weight
    return weight


def head_answer(
    hidden: torch.Tensor, head: torch.Tensor | ValueHead, asked: HeadQuery, vocabulary: int
) -> dict[str, torch.Tensor]:
    """Compute the outputs that are `asked` for, by their names in `ModelOutputs`, and ``logits``.

    `hidden` is the head's input, [tokens and padding of this rank, width]. Rows of the head beyond the `vocabulary` are padding.
    """

    def compute(query: PassQuery, read: torch.Tensor) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        places = asked.places
        if query.hidden:
            found["hidden"] = _read_by_all(hidden)[read]
        if isinstance(head, ValueHead):
            found["values"] = head.values(_read_by_all(hidden)[places[query.rows]])
            return found
        if query.logit_rows is not None:
            mine = torch.nn.functional.linear(hidden[places[query.logit_rows]].to(head.dtype), head).float()
            found["logits"] = gather_from_tensor_model_parallel_region(mine)[:, :vocabulary]
        if query.asks_head:
            ranks = parallel_state.get_tensor_model_parallel_world_size()
            first = parallel_state.get_tensor_model_parallel_rank() * len(head)
            share = VocabularyShare(first, parallel_state.get_tensor_model_parallel_group()) if ranks > 1 else None
            weight = head[: max(0, vocabulary - first)]
            found |= query.from_head(hidden[places[query.rows]].to(head.dtype), weight, asked.micro, share=share)
        return found

    return asked.answered(compute)


def _read_by_all(hidden: torch.Tensor) -> torch.Tensor:
    """Return `hidden` for a computation that tensor parallel ranks repeat: divides its gradient, since these are summed."""
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    shared = hidden.view_as(hidden)
    if shared.requires_grad and ranks > 1:
        shared.register_hook(lambda gradient: gradient / ranks)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return shared
