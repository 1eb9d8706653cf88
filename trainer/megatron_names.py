"""Which part of which Hugging Face checkpoint tensor each of megatron-core's local parameters is.

Plain arithmetic on names and shapes: imports neither megatron-core nor transformers, talks to no peer, and moves no data. The
layouts are those of megatron-core's ``GPTModel`` with its local layers:

* ``linear_qkv`` holds, for one group of query heads after the other, the group's queries, its key and its value (rows).
* ``linear_fc1`` holds this rank's rows of ``gate_proj``, then its rows of ``up_proj``.
* ``linear_proj`` and ``linear_fc2`` are split by columns, everything else that is split by rows.
* The vocabulary is padded to a multiple of the tensor parallel size; rows of padding belong to no checkpoint tensor.
* With tied embeddings and several pipeline stages, the last stage holds a copy of the embedding as ``output_layer``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from weightlane.sync.boxes import Box

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes of a decoder-only model, in the words of its Hugging Face configuration."""

    layers: int
    hidden: int
    intermediate: int
    """Of the dense feed-forward layers; 0 when every layer has experts."""
    heads: int
    groups: int
    """Key and value heads."""
    head_dim: int
    vocab: int
    tied: bool
    qk_norm: bool
    """Whether queries and keys are normalised by head."""
    experts: int = 0
    expert_intermediate: int = 0

    @property
    def queries(self) -> int:
        """Rows of one group's queries."""
        return self.heads // self.groups * self.head_dim


@dataclass(frozen=True, slots=True)
class Coordinates:
    """Where a rank stands in the dimensions that cut tensors."""

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a local parameter that is a rectangle of a checkpoint tensor."""

    name: str
    """Of the checkpoint tensor."""
    starts: tuple[int, ...]
    """First index in the checkpoint tensor, by dimension."""
    box: Box
    """The elements of the parameter."""


def checkpoint_shapes(model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the checkpoint, in the order in which ranks list them."""
    hidden, rows, groups = model.hidden, model.heads * model.head_dim, model.groups * model.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (model.vocab, hidden)}

    def feed_forward(prefix: str, intermediate: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}.up_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, intermediate)

    for index in range(model.layers):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.self_attn.q_proj.weight"] = (rows, hidden)
        shapes[f"{layer}.self_attn.k_proj.weight"] = (groups, hidden)
        shapes[f"{layer}.self_attn.v_proj.weight"] = (groups, hidden)
        if model.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (model.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (model.head_dim,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, rows)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if model.experts:
            shapes[f"{layer}.mlp.gate.weight"] = (model.experts, hidden)
            for expert in range(model.experts):
                feed_forward(f"{layer}.mlp.experts.{expert}", model.expert_intermediate)
        else:
            feed_forward(f"{layer}.mlp", model.intermediate)
    shapes[FINAL_NORM] = (hidden,)
    if not model.tied:
        shapes[HEAD] = (model.vocab, hidden)
    return shapes


def pieces_of(name: str, shape: tuple[int, ...], model: ModelShape, at: Coordinates) -> list[Piece]:
    """The checkpoint tensors, or parts of them, in one local parameter; together they are all of it but vocabulary padding.

    Args:
        name: the parameter's name within ``GPTModel``, with the layer's number in the whole model.
        shape: the local parameter's shape.
        model: the model's sizes.
        at: the rank that holds it.

    Raises `KeyError` for a parameter that is in no supported model.
    """
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return [_vocabulary(EMBEDDING if name.startswith("embedding") or model.tied else HEAD, shape, model, at)]
    if name == "decoder.final_layernorm.weight":
        return [_all_of(FINAL_NORM, shape)]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if match is None:
        raise KeyError(name)
    return _layer_pieces(f"model.layers.{match[1]}", match[2], shape, model, at)


def _layer_pieces(layer: str, inner: str, shape: tuple[int, ...], model: ModelShape, at: Coordinates) -> list[Piece]:
    if inner in _WHOLE:
        return [_all_of(f"{layer}.{_WHOLE[inner]}", shape)]
    if inner == "self_attention.linear_qkv.weight":
        return list(_attention(f"{layer}.self_attn", shape, model, at.tensor_rank))
    if inner == "self_attention.linear_proj.weight":
        return [_columns(f"{layer}.self_attn.o_proj.weight", shape, at.tensor_rank)]
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)", inner)
    if expert:  # experts are whole on their rank: tensor parallelism does not cut them
        number = at.expert_rank * (model.experts // at.expert_size) + int(expert[1])
        return list(_feed_forward(f"{layer}.mlp.experts.{number}", expert[2], shape, 0))
    if inner in ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight"):
        return list(_feed_forward(f"{layer}.mlp", inner.removeprefix("mlp."), shape, at.tensor_rank))
    raise KeyError(inner)


_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Parameters of a layer that every tensor parallel rank holds whole, and their names in the checkpoint."""


def _vocabulary(name: str, shape: tuple[int, ...], model: ModelShape, at: Coordinates) -> Piece:
    first = min(at.tensor_rank * shape[0], model.vocab)
    rows = min(shape[0], model.vocab - first)
    return Piece(name, (first, 0), Box((0, 0), (rows, shape[1])))


def _all_of(name: str, shape: tuple[int, ...]) -> Piece:
    return Piece(name, (0,) * len(shape), Box.whole(shape))


def _columns(name: str, shape: tuple[int, ...], rank: int) -> Piece:
    return Piece(name, (0, rank * shape[1]), Box.whole(shape))


def _attention(prefix: str, shape: tuple[int, ...], model: ModelShape, rank: int) -> Iterator[Piece]:
    columns, dim, queries = shape[1], model.head_dim, model.queries
    local_groups = shape[0] // (queries + 2 * dim)
    for local in range(local_groups):
        group, row = rank * local_groups + local, local * (queries + 2 * dim)
        for kind, rows in (("q", queries), ("k", dim), ("v", dim)):
            yield Piece(f"{prefix}.{kind}_proj.weight", (group * rows, 0), Box((row, 0), (rows, columns)))
            row += rows


def _feed_forward(prefix: str, inner: str, shape: tuple[int, ...], rank: int) -> Iterator[Piece]:
    if inner == "linear_fc2.weight":
        yield _columns(f"{prefix}.down_proj.weight", shape, rank)
        return
    rows = shape[0] // 2
    for index, kind in enumerate(("gate", "up")):
        yield Piece(f"{prefix}.{kind}_proj.weight", (rank * rows, 0), Box((index * rows, 0), (rows, shape[1])))
