"""The rows of packed tokens that a chunk computes: megatron-core's description of one, and which part of it this rank has."""

from __future__ import annotations

from collections.abc import Sequence
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
from ..hf.layout import Layout
from ..hf.packed_attention import SEGMENTS
from ..rank_collectives import ContextRanks
from .model_facts import CheckpointShape


@dataclass
class PackedRow(PackedSeqParams):  # type: ignore[misc]  # megatron-core is untyped to us
    """megatron-core's description of a row, and what each of this rank's tokens sees."""

    segments: Any = None
    positions: torch.Tensor | None = None
    """int64 [tokens]: their positions, where these are not those from the start of each sequence on."""
    experts: torch.Tensor | None = None
    """The experts to which the tokens that this rank routes are to be routed: see `MicroBatch.placed_experts`."""

    @classmethod
    def of(
        cls,
        segments: Segments,
        offsets: Sequence[int],
        lengths: Sequence[int] = (),
        positions: torch.Tensor | None = None,
    ) -> PackedRow:
        """Describe a row with runs of tokens between `offsets`.

        If sequences share tokens, the row is one run: `lengths` are those of the sequences, and `positions` are needed.
        """
        longest = max(lengths or (stop - start for start, stop in pairwise(offsets)))
        starts = torch.tensor(offsets, dtype=torch.int32, device=segments.device)  # as TransformerEngine takes them
        return cls(
            "thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest, segments=segments, positions=positions
        )


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
    def of(cls, laid_out: Layout, layout: MegatronConfig, replayed: CheckpointShape | None = None) -> RowInput:
        """Make this rank's input of a packed micro-batch; with the experts of its tokens, if the model's shape is `replayed`."""
        if layout.context_parallel > 1:
            row = cls._of_part(laid_out.micro, layout)
        else:
            tokens, positions, segments = (laid_out.inputs[name] for name in ("input_ids", "position_ids", SEGMENTS))
            offsets, count = laid_out.micro.offsets.tolist(), tokens.numel()
            if sum(laid_out.counts) < offsets[-1]:
                packed = PackedRow.of(segments, [0, count], laid_out.micro.lengths.tolist(), positions[0])
            else:
                packed = PackedRow.of(segments, [*offsets, *([count] if count > offsets[-1] else [])])
            row = cls(tokens, positions, packed, laid_out.micro, laid_out.places, None)
        if replayed is not None:
            of_model = {"layers": replayed.layers, "experts": replayed.experts}
            row.packed.experts = row.micro.placed_experts(row.places, row.tokens.numel(), **of_model)
            if layout.sequence_parallel:  # of which every rank routes a part
                rank = parallel_state.get_tensor_model_parallel_rank()
                row.packed.experts = row.packed.experts.chunk(layout.tensor_parallel)[rank]
        return row

    @classmethod
    def _of_part(cls, micro: MicroBatch, layout: MegatronConfig) -> RowInput:
        """Make the input of one of the ranks that share tokens.

        Each has two blocks of every sequence, one from its start and one, as far, from its end: this is what megatron-core's
        rotary embedding expects. Sequences are padded to equal blocks at their ends. Another sequence of padding at the end
        makes the tokens of a rank a multiple of the ranks of sequence parallelism.
        """
        count, device = layout.context_parallel, micro.tokens.device
        blocks = 2 * count
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
        part = RowPart.of(Segments(bounds, (), device), of_ranks, context, device)
        packed = PackedRow.of(part.segments, offsets.tolist())
        return cls(tokens[part.own][None], positions[part.own][None], packed, micro, part.places(places), context)

    def asked(self, query: PassQuery) -> HeadQuery:
        """Return the request for outputs of the micro-batch."""
        return HeadQuery(query, self.micro, self.places, self.context)


def run_chunk(chunk: Any, row: RowInput) -> torch.Tensor:
    """Run a chunk on a row; the last one returns its head's input, [1, tokens of this rank, width]."""
    output: torch.Tensor = chunk(row.tokens, row.positions, None, packed_seq_params=row.packed)
    return output
