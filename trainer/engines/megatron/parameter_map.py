"""Map megatron-core's local parameters to parts of Hugging Face checkpoint tensors.

Plain arithmetic on names and shapes: imports neither megatron-core nor transformers, sends nothing, and moves no data. The
layouts are those of megatron-core's ``GPTModel`` with its local layers:

* ``linear_qkv`` holds, for one group of query heads after the other, the group's queries, its key and its value (rows).
* ``linear_fc1`` holds this rank's rows of ``gate_proj``, then its rows of ``up_proj``. GPT-OSS's experts have both in turns.
* Grouped experts hold, in one ``linear_fc1`` and one ``linear_fc2``, the rows of one expert after those of the other.
* ``linear_proj`` and ``linear_fc2`` are split by columns; all other split tensors are split by rows.
* With an output gate, ``linear_qkv`` has the gates of a group's heads after its queries. Linear attention splits the fused
  projections of the checkpoint by rows, and the parts for queries, keys and values of its convolution each by themselves.
* In multi-latent attention, down projections are full on every rank, and up projections are split by heads (rows).
* The vocabulary is padded to a multiple of the tensor parallel size; rows of padding belong to no checkpoint tensor.
* With tied embeddings and several pipeline stages, the last stage holds a copy of the embedding as ``output_layer``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from weightlane.sync.version.box import Box

from .model_facts import CheckpointShape


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The position of a rank in the parallel dimensions that split tensors."""

    tensor_rank: int = 0
    expert_rank: int = 0
    expert_size: int = 1

    def first_expert(self, model: CheckpointShape) -> int:
        """Return the number of the first expert of each layer on this rank."""
        return self.expert_rank * (model.experts // self.expert_size)


@dataclass(frozen=True, slots=True)
class CheckpointSlice:
    """A rectangle of a local parameter that is a rectangle of a checkpoint tensor."""

    name: str
    """Name of the checkpoint tensor."""
    starts: tuple[int, ...]
    """First index in the checkpoint tensor, by dimension of the local parameter."""
    box: Box
    """The elements of the local parameter."""
    expert: int | None = None
    """The first index in a checkpoint tensor of all experts, the others of which are in reverse order; None for other tensors."""

    def place(self, box: Box) -> Box:
        """Return where `box`, a part of the slice's own, is in the checkpoint tensor."""
        starts = [
            first + low - offset for first, low, offset in zip(self.starts, box.starts, self.box.starts, strict=True)
        ]
        if self.expert is None:
            return Box(tuple(starts), box.shape)
        return Box((self.expert, *reversed(starts)), (1, *reversed(box.shape)))

    def turned(self, held: torch.Tensor) -> torch.Tensor:
        """Return a view of `held`, elements of the local parameter, with the dimensions of the checkpoint tensor."""
        return held if self.expert is None else held.permute(*reversed(range(held.ndim)))[None]


def pieces_of(name: str, shape: tuple[int, ...], model: CheckpointShape, at: Coordinates) -> list[CheckpointSlice]:
    """List the checkpoint tensors, or parts of them, in one local tensor; they cover it except for vocabulary padding.

    `name` is that within ``GPTModel``, with the layer's number in the full model. Raises `KeyError` for a parameter that is in no
    supported model.
    """
    if model.valued and name.startswith("output_layer."):
        return [_all_of(name.replace("output_layer", "score"), shape)]
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        embedding = name.startswith("embedding") or model.tied
        return [_vocabulary("model.embed_tokens.weight" if embedding else "lm_head.weight", shape, model, at)]
    if name == "decoder.final_layernorm.weight":
        return [_all_of("model.norm.weight", shape)]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if match is None:
        raise KeyError(name)
    return _layer_pieces(f"model.layers.{match[1]}", match[2], shape, model, at)


def _layer_pieces(
    layer: str, inner: str, shape: tuple[int, ...], model: CheckpointShape, at: Coordinates
) -> list[CheckpointSlice]:
    whole = {**_WHOLE, **(_LATENT_WHOLE if model.latent else {}), **(_GPT_OSS_WHOLE if model.gpt_oss else {})}
    for names, piece in ((whole, _all_of), (_ROWS, _rows), (_COLUMNS, _columns)):
        if inner in names:
            return [piece(f"{layer}.{names[inner]}", shape, at.tensor_rank)]
    if inner.startswith("self_attention."):
        return list(_attention(layer, inner.removeprefix("self_attention."), shape, model, at.tensor_rank))
    return list(_feed_forward(f"{layer}.mlp", inner.removeprefix("mlp."), shape, model, at))


_STACKED = {
    "linear_fc1.weight": "gate_up_proj",
    "linear_fc1.bias": "gate_up_proj_bias",
    "linear_fc2.weight": "down_proj",
    "linear_fc2.bias": "down_proj_bias",
}
"""Tensors of one of GPT-OSS's experts, and those of all of them in the checkpoint."""

_WHOLE = {
    "self_attn_bda.norm.weight": "post_self_attn_layernorm.weight",
    "mlp_bda.norm.weight": "post_mlp_layernorm.weight",
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    "self_attention.norm_weight": "linear_attn.norm.weight",
}
"""Tensors of a layer that every tensor parallel rank holds in full, and their names in the checkpoint."""

_LATENT_WHOLE = {
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
}
"""The same for multi-latent attention."""

_GPT_OSS_WHOLE = {
    "self_attention.linear_proj.bias": "self_attn.o_proj.bias",
    "mlp.router.weight": "mlp.router.weight",
    "mlp.router.bias": "mlp.router.bias",
}
"""The same for GPT-OSS."""

_ROWS = {
    "self_attention.core_attention.softmax_offset": "self_attn.sinks",
    "self_attention.dt_bias": "linear_attn.dt_bias",
    "self_attention.log_decay": "linear_attn.A_log",
    "self_attention.in_proj_qkvz.weight": "linear_attn.in_proj_qkvz.weight",
    "self_attention.in_proj_ba.weight": "linear_attn.in_proj_ba.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}
"""Parameters of a layer that tensor parallelism splits by rows, without fused ones, and their names in the checkpoint."""

_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.out_proj.weight": "linear_attn.out_proj.weight",
}
"""Likewise those that it splits by columns."""


def _vocabulary(name: str, shape: tuple[int, ...], model: CheckpointShape, at: Coordinates) -> CheckpointSlice:
    first = min(at.tensor_rank * shape[0], model.vocab)
    rows = min(shape[0], model.vocab - first)
    return CheckpointSlice(name, (first, 0), Box((0, 0), (rows, shape[1])))


def _all_of(name: str, shape: tuple[int, ...], _: int = 0) -> CheckpointSlice:
    return CheckpointSlice(name, (0,) * len(shape), Box.whole(shape))


def _rows(name: str, shape: tuple[int, ...], rank: int) -> CheckpointSlice:
    return CheckpointSlice(name, (rank * shape[0], *[0] * len(shape[1:])), Box.whole(shape))


def _columns(name: str, shape: tuple[int, ...], rank: int) -> CheckpointSlice:
    return CheckpointSlice(name, (0, rank * shape[1]), Box.whole(shape))


def _attention(
    layer: str, inner: str, shape: tuple[int, ...], model: CheckpointShape, rank: int
) -> Iterator[CheckpointSlice]:
    """Yield the parts of what fuses queries, keys and values: a projection's weight or bias, or a convolution's weight."""

    def rows(name: str, start: int, row: int, count: int) -> CheckpointSlice:
        rest = (0,) * len(shape[1:])
        return CheckpointSlice(f"{layer}.{name}", (start, *rest), Box((row, *rest), (count, *shape[1:])))

    row = 0
    if inner == "conv_weight" and model.delta:
        ranks, start = sum(model.delta.convolved) // shape[0], 0
        for count in model.delta.convolved:
            part = count // ranks
            yield rows("linear_attn.conv1d.weight", start + rank * part, row, part)
            start, row = start + count, row + part
        return
    kind = inner.removeprefix("linear_qkv.")
    if kind != "weight" and not (kind == "bias" and model.qkv_bias):
        raise KeyError(inner)
    dim, queries, heads = model.head_dim, model.queries, model.heads // model.groups
    of_group = (2 if model.delta else 1) * queries + 2 * dim
    local_groups = shape[0] // of_group
    for local in range(local_groups):
        group = rank * local_groups + local
        if model.delta:  # each head's queries, and each head's gate; in the checkpoint one head after the other
            for gate in (0, 1):
                for head in range(group * heads, (group + 1) * heads):
                    yield rows(f"self_attn.q_proj.{kind}", (2 * head + gate) * dim, row, dim)
                    row += dim
        for of, count in (("q", queries), ("k", dim), ("v", dim))[bool(model.delta) :]:
            yield rows(f"self_attn.{of}_proj.{kind}", group * count, row, count)
            row += count


def _feed_forward(
    prefix: str, inner: str, shape: tuple[int, ...], model: CheckpointShape, at: Coordinates
) -> Iterator[CheckpointSlice]:
    """Yield the parts of a layer of ``mlp`` that is all of a feed-forward layer, or of an expert."""
    match = re.fullmatch(
        r"(experts\.(?:local_experts\.(\d+)\.)?|shared_experts\.|)(linear_fc[12]\.(?:weight|bias))", inner
    )
    if match is None or (match[3].endswith("bias") and not model.gpt_oss):
        raise KeyError(inner)
    rank, name = at.tensor_rank, match[3]
    if match[1] == "experts.":
        yield from _grouped(f"{prefix}.experts", name, shape, model, at)
        return
    if match[2]:  # tensor parallelism does not split experts
        rank, number = 0, at.first_expert(model) + int(match[2])
        if model.gpt_oss:
            yield CheckpointSlice(f"{prefix}.experts.{_STACKED[name]}", (0,) * len(shape), Box.whole(shape), number)
            return
        prefix = f"{prefix}.experts.{number}"
    elif match[1]:
        prefix = f"{prefix}.{model.shared_experts}"
    yield from _linears(prefix, name, shape, rank, model)


def _grouped(
    prefix: str, name: str, shape: tuple[int, ...], model: CheckpointShape, at: Coordinates
) -> Iterator[CheckpointSlice]:
    count = model.experts // at.expert_size
    rows = shape[0] // count
    for place in range(count):
        number = at.first_expert(model) + place
        for piece in _linears(f"{prefix}.{number}", name, (rows, shape[1]), 0, model):
            yield replace(piece, box=Box((place * rows + piece.box.starts[0], 0), piece.box.shape))


def _linears(
    prefix: str, name: str, shape: tuple[int, ...], rank: int, model: CheckpointShape
) -> Iterator[CheckpointSlice]:
    if name == "linear_fc2.weight":
        yield _columns(f"{prefix}.down_proj.weight", shape, rank)
        return
    rows = shape[0] // 2
    for index, kind in enumerate(("gate", "up")):
        part, start = f"{prefix}.{kind}_proj.weight", rank * rows
        if model.fused_gate:
            part, start = f"{prefix}.gate_up_proj.weight", start + index * model.intermediate
        yield CheckpointSlice(part, (start, 0), Box((index * rows, 0), (rows, shape[1])))
