"""Run packed micro-batches through megatron-core's pipeline schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch.nn import functional

from ...data.sequences import MicroBatch

Part = tuple[list[int], MicroBatch]
"""The indices of a micro-batch's sequences in their batch, and the micro-batch."""


def run_schedule(
    chunks: Sequence[Any],
    share: Sequence[Part],
    use: Callable[[Any, Part, torch.Tensor], torch.Tensor],
    *,
    multiple: int,
    forward_only: bool,
) -> None:
    """Run this rank's micro-batches forward and, unless `forward_only`, backward through all pipeline stages.

    Args:
        chunks: this rank's parts of the model.
        share: the micro-batches, the same on all stages of the pipeline.
        use: called on the last stage with the chunk, the part and the head's input, [tokens, width]; returns the part's loss.
        multiple: tokens of a micro-batch are padded to a multiple of it, by a sequence of padding at the end.
        forward_only: whether there are no gradients.
    """

    def forward(parts: Iterator[Part], chunk: Any) -> tuple[torch.Tensor, Callable[..., Any]]:
        part = next(parts)

        def finish(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
            return use(chunk, part, hidden[0]), torch.zeros((), dtype=torch.int, device=hidden.device), {}

        return run_chunk(chunk, part[1], multiple), finish

    get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(share) for _ in chunks],
        model=chunks,
        num_microbatches=len(share),
        seq_length=len(share[0][1].tokens),  # lengths vary, and are sent along
        micro_batch_size=1,
        forward_only=forward_only,
    )


def run_chunk(chunk: Any, micro: MicroBatch, multiple: int) -> torch.Tensor:
    """Run a chunk on a micro-batch, see `run_schedule`; the last one returns its head's input, [1, tokens, width]."""
    padding = -len(micro.tokens) % multiple
    tokens, positions = (functional.pad(each, (0, padding)) for each in (micro.tokens, micro.positions))
    offsets = torch.cat([micro.offsets, micro.offsets[-1:] + padding]) if padding else micro.offsets
    longest = int(offsets.diff().max())
    packed = PackedSeqParams("thd", offsets, offsets, max_seqlen_q=longest, max_seqlen_kv=longest)
    output: torch.Tensor = chunk(tokens[None], positions[None], None, packed_seq_params=packed)
    return output
