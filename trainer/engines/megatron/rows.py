"""The rows of packed tokens that a chunk computes: megatron-core's description of one, and which part of it this rank has."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams

from ...config import MegatronConfig
from ...data.sequences import MicroBatch
from ..attention import Segments
from ..head import PassQuery
from ..hf.context_split import RowPart
from ..hf.heads import HeadQuery
from ..rank_collectives import ContextRanks
from .checkpoint import CheckpointShape


@dataclass
class PackedRow(PackedSeqParams):  # type: ignore[misc]  # megatron-core is untyped to us
    """megatron-core's description of a row, and what each of this rank's tokens sees."""

    segments: Any = None
    experts: torch.Tensor | None = None
    """The experts to which the tokens that this rank routes are to be routed: see `MicroBatch.placed_experts`."""


@dataclass(frozen=True, slots=True)
class RowInput:
    """The input of a chunk for a micro-batch of N tokens."""

    tokens: torch.Tensor
    """int64 [1, tokens of this rank], padding included."""
    positions: torch.Tensor
    """int64 of this shape."""
    packed: PackedRow
    micro: MicroBatch
    places: torch.Tensor
    """int64 [N]: where each token of the micro-batch is among those of this rank; -1 if another rank computes it."""
    context: ContextRanks | None
    """The ranks that share the tokens, if any do."""

    @classmethod
    def of(cls, micro: MicroBatch, layout: MegatronConfig, replayed: CheckpointShape | None = None) -> RowInput:
        """Make this rank's input of `micro`.

        Ranks that share tokens each have two blocks of every sequence, one from its start and one, as far, from its end: this is
        what megatron-core's rotary embedding expects. Sequences are padded to equal blocks at their ends. Another sequence of
        padding at the end makes the tokens of a rank a multiple of the ranks of sequence parallelism. With `replayed`, the
        shape of the model, it has the experts of tokens.
        """
        count = layout.context_parallel
        blocks, device = 2 * count if count > 1 else 1, micro.tokens.device
        lengths = -(-micro.lengths // blocks) * blocks
        added = -int(lengths.sum()) % (blocks * layout.tensor_parallel if layout.sequence_parallel else 1)
        offsets = torch.cat([lengths.new_zeros(1), lengths, *([lengths.new_tensor([added])] if added else [])]).cumsum(
            0
        )
        bounds = list(pairwise(offsets.tolist()))
        places = offsets[:-1][micro.sequence_of] + micro.positions
        tokens, positions = (
            each.new_zeros(bounds[-1][1]).index_copy(0, places, each) for each in (micro.tokens, micro.positions)
        )
        segments, context = Segments(bounds, (), device), None
        if count > 1:
            context = ContextRanks(
                parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_rank(), count
            )
            of_ranks = [
                [
                    (start + block * (stop - start) // blocks, start + (block + 1) * (stop - start) // blocks)
                    for start, stop in bounds
                    for block in (rank, blocks - 1 - rank)
                ]
                for rank in range(count)
            ]
            part = RowPart.of(segments, of_ranks, context, device)
            tokens, positions, places, segments = (
                tokens[part.own],
                positions[part.own],
                part.places(places),
                part.segments,
            )
        longest = max(stop - start for start, stop in bounds)
        starts = offsets.to(torch.int32)  # as TransformerEngine takes them
        packed = PackedRow("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest, segments=segments)
        if replayed is not None:
            of_model = {"layers": replayed.layers, "experts": replayed.experts}
            packed.experts = micro.placed_experts(places, len(tokens), **of_model)
            if layout.sequence_parallel:  # of which every rank routes a part
                rank = parallel_state.get_tensor_model_parallel_rank()
                packed.experts = packed.experts.chunk(layout.tensor_parallel)[rank]
        return cls(tokens[None], positions[None], packed, micro, places, context)

    def asked(self, query: PassQuery) -> HeadQuery:
        """Return the request for outputs of the micro-batch."""
        return HeadQuery(query, self.micro, self.places, self.context)


def run_chunk(chunk: Any, row: RowInput) -> torch.Tensor:
    """Run a chunk on a row; the last one returns its head's input, [1, tokens of this rank, width]."""
    output: torch.Tensor = chunk(row.tokens, row.positions, None, packed_seq_params=row.packed)
    return output
