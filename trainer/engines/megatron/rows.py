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
from ..hf.context_split import RowPart
from ..hf.layout import Layout
from ..hf.packed_attention import SEGMENTS
from ..rank_collectives import ContextRanks
from .model_facts import CheckpointShape


@dataclass
class PackedRow(PackedSeqParams):  # type: ignore[misc]  # megatron-core is untyped to us
    """megatron-core's description of a row, with the tokens that this rank computes, and what each of them sees."""

    layout: Any = None
    """A `Layout` of these tokens, padding included."""
    positions: torch.Tensor | None = None
    """int64 [tokens]: their positions, where these are not those from the start of each sequence on."""
    experts: torch.Tensor | None = None
    """The experts to which the tokens that this rank routes are to be routed: see `MicroBatch.placed_experts`."""

    @property
    def segments(self) -> Segments:
        """What each token sees."""
        found: Segments = self.layout.inputs[SEGMENTS]
        return found

    @classmethod
    def of(cls, laid_out: Layout, layout: MegatronConfig, replayed: CheckpointShape | None = None) -> PackedRow:
        """Describe this rank's part of a packed micro-batch; with its tokens' experts, if the model's shape is `replayed`."""
        micro, tokens = laid_out.micro, laid_out.inputs["input_ids"]
        offsets, count = micro.offsets.tolist(), tokens.numel()
        if layout.context_parallel > 1:
            row = cls._between(*_part_of(micro, layout))
        elif sum(laid_out.counts) < offsets[-1]:  # sequences share tokens, so the row is one run
            row = cls._between(laid_out, [0, count])
            row.max_seqlen_q = row.max_seqlen_kv = int(micro.lengths.max())
            row.positions = laid_out.inputs["position_ids"][0]
        else:
            row = cls._between(laid_out, [*offsets, *([count] if count > offsets[-1] else [])])
        if replayed is not None:
            of_model = {"layers": replayed.layers, "experts": replayed.experts}
            here = row.layout.inputs["input_ids"].numel()
            row.experts = micro.placed_experts(row.layout.places, here, **of_model)
            if layout.sequence_parallel:  # of which every rank routes a part
                row.experts = row.experts.chunk(layout.tensor_parallel)[parallel_state.get_tensor_model_parallel_rank()]
        return row

    @classmethod
    def _between(cls, layout: Layout, offsets: Sequence[int]) -> PackedRow:
        """Describe a row with runs of tokens between `offsets`."""
        longest = max(stop - start for start, stop in pairwise(offsets))
        device = layout.inputs["input_ids"].device
        starts = torch.tensor(offsets, dtype=torch.int32, device=device)  # as TransformerEngine takes them
        return cls("thd", starts, starts, max_seqlen_q=longest, max_seqlen_kv=longest, layout=layout)


def _part_of(micro: MicroBatch, layout: MegatronConfig) -> tuple[Layout, list[int]]:
    """Return the tokens of one of the ranks that share a row, and where sequences begin and end in the row of all of them.

    Each has two blocks of every sequence, one from its start and one, as far, from its end: this is what megatron-core's rotary
    embedding expects. Sequences are padded to equal blocks at their ends. Another sequence of padding at the end makes the tokens
    of a rank a multiple of the ranks of sequence parallelism.
    """
    count, device = layout.context_parallel, micro.tokens.device
    blocks = 2 * count
    lengths = -(-micro.lengths // blocks) * blocks
    added = -int(lengths.sum()) % (blocks * layout.tensor_parallel if layout.sequence_parallel else 1)
    offsets = torch.cat([lengths.new_zeros(1), lengths, *([lengths.new_tensor([added])] if added else [])]).cumsum(0)
    bounds = list(pairwise(offsets.tolist()))
    places = offsets[:-1][micro.sequence_of] + micro.positions
    tokens, positions = (
        each.new_zeros(bounds[-1][1]).index_copy(0, places, each) for each in (micro.tokens, micro.positions)
    )
    ranks = ContextRanks(parallel_state.get_context_parallel_group(), parallel_state.get_context_parallel_rank(), count)
    of_ranks = [
        [
            (start + block * (stop - start) // blocks, start + (block + 1) * (stop - start) // blocks)
            for start, stop in bounds
            for block in (rank, blocks - 1 - rank)
        ]
        for rank in range(count)
    ]
    part = RowPart.of(Segments(bounds, (), device), of_ranks, ranks, device)
    row = {"input_ids": tokens[part.own][None], "position_ids": positions[part.own][None], SEGMENTS: part.segments}
    counts = (len(micro.tokens),)
    return Layout(micro, part.places(places), row, counts, (len(part.own),), ranks), offsets.tolist()


def run_chunk(chunk: Any, row: PackedRow) -> torch.Tensor:
    """Run a chunk on a row; the last one returns its head's input, [1, tokens of this rank, width]."""
    inputs = row.layout.inputs
    output: torch.Tensor = chunk(inputs["input_ids"], inputs["position_ids"], None, packed_seq_params=row)
    return output
