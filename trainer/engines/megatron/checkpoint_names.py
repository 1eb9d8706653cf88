"""Map megatron-core's local parameters to parts of Hugging Face checkpoint tensors.

Plain arithmetic on names and shapes: imports neither megatron-core nor transformers, sends nothing, and moves no data. The
layouts are those of megatron-core's ``GPTModel`` with its local layers:

* ``linear_qkv`` holds, for one group of query heads after the other, the group's queries, its key and its value (rows).
* ``linear_fc1`` holds this rank's rows of ``gate_proj``, then its rows of ``up_proj``.
* ``linear_proj`` and ``linear_fc2`` are split by columns; all other split tensors are split by rows.
* In multi-latent attention, down projections are full on every rank, and up projections are split by heads (rows).
* The vocabulary is padded to a multiple of the tensor parallel size; rows of padding belong to no checkpoint tensor.
* With tied embeddings and several pipeline stages, the last stage holds a copy of the embedding as ``output_layer``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from weightlane.sync.version.box import Box

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
VALUE_HEAD = "score."
"""Prefix of the names of a critic's weight and bias."""


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of multi-latent attention (DeepSeek-V2, arXiv 2405.04434), per head unless stated otherwise."""

    query_rank: int
    """Length of the queries' latent vector, for all heads; 0 if queries are projected directly, without one."""
    rank: int
    """Length of the latent vector of keys and values, for all heads."""
    plain_dim: int
    """Size of a head of queries and keys, without the rotary part."""
    rotary_dim: int
    """Size of the rotary part, which all heads of the keys share."""
    value_dim: int

    @property
    def query_dim(self) -> int:
        """Rows of a head's queries."""
        return self.plain_dim + self.rotary_dim


@dataclass(frozen=True, slots=True)
class CheckpointShape:
    """The sizes of a decoder-only model, as its Hugging Face configuration has them."""

    layers: int
    hidden: int
    intermediate: int
    """Hidden size of the dense feed-forward layers; 0 when every layer has experts."""
    heads: int
    groups: int
    """Number of key and value heads."""
    head_dim: int
    vocab: int
    tied: bool
    qk_norm: bool
    """Whether queries and keys are normalised by head."""
    qkv_bias: bool = False
    """Whether the projections to queries, keys and values have biases."""
    experts: int = 0
    expert_intermediate: int = 0
    dense_layers: int = 0
    """Number of layers without experts, the first ones, in a model with experts."""
    shared_intermediate: int = 0
    """Hidden size of all shared experts together, which every token goes through; 0 without any."""
    expert_bias: bool = False
    """Whether a bias, which is not trained, is added in choosing experts."""
    valued: bool = False
    """Whether it is a critic: its head has one row and a bias, and `tied` is False."""
    latent: LatentShape | None = None
    """Sizes of multi-latent attention, with which `groups` and `head_dim` have no meaning; None without it."""

    def has_experts(self, layer: int) -> bool:
        """Whether a decoder layer, counted from 0, has experts."""
        return bool(self.experts) and layer >= self.dense_layers

    @property
    def queries(self) -> int:
        """Rows of one group's queries."""
        return self.heads // self.groups * self.head_dim


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
    """First index in the checkpoint tensor, by dimension."""
    box: Box
    """The elements of the local parameter."""


def checkpoint_shapes(model: CheckpointShape) -> dict[str, tuple[int, ...]]:
    """Return the shape of every checkpoint tensor by name, in the order in which ranks list them."""
    hidden = model.hidden
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (model.vocab, hidden)}

    def feed_forward(prefix: str, intermediate: int) -> None:
        shapes[f"{prefix}.gate_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}.up_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}.down_proj.weight"] = (hidden, intermediate)

    for index in range(model.layers):
        layer = f"model.layers.{index}"
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        for inner, shape in _attention_shapes(model).items():
            shapes[f"{layer}.self_attn.{inner}.weight"] = shape
            if model.qkv_bias and inner in ("q_proj", "k_proj", "v_proj"):
                shapes[f"{layer}.self_attn.{inner}.bias"] = shape[:1]
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
        if model.has_experts(index):
            shapes[f"{layer}.mlp.gate.weight"] = (model.experts, hidden)
            if model.expert_bias:
                shapes[f"{layer}.mlp.{EXPERT_BIAS}"] = (model.experts,)
            for expert in range(model.experts):
                feed_forward(f"{layer}.mlp.experts.{expert}", model.expert_intermediate)
            if model.shared_intermediate:
                feed_forward(f"{layer}.mlp.shared_experts", model.shared_intermediate)
        else:
            feed_forward(f"{layer}.mlp", model.intermediate)
    return {**shapes, FINAL_NORM: (hidden,), **_head_shapes(model)}


def _head_shapes(model: CheckpointShape) -> dict[str, tuple[int, ...]]:
    if model.valued:
        return {f"{VALUE_HEAD}weight": (1, model.hidden), f"{VALUE_HEAD}bias": (1,)}
    return {} if model.tied else {HEAD: (model.vocab, model.hidden)}


def _attention_shapes(model: CheckpointShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of one layer's attention tensors by name within ``self_attn``, without ``.weight``."""
    hidden, heads, latent = model.hidden, model.heads, model.latent
    if latent is None:
        rows, groups = heads * model.head_dim, model.groups * model.head_dim
        norms = {"q_norm": (model.head_dim,), "k_norm": (model.head_dim,)} if model.qk_norm else {}
        projections = {"q_proj": (rows, hidden), "k_proj": (groups, hidden), "v_proj": (groups, hidden)}
        return {**projections, **norms, "o_proj": (hidden, rows)}
    queries = heads * latent.query_dim
    if latent.query_rank:
        down = {"q_a_proj": (latent.query_rank, hidden), "q_a_layernorm": (latent.query_rank,)}
        of_queries = {**down, "q_b_proj": (queries, latent.query_rank)}
    else:
        of_queries = {"q_proj": (queries, hidden)}
    return {
        **of_queries,
        "kv_a_proj_with_mqa": (latent.rank + latent.rotary_dim, hidden),
        "kv_a_layernorm": (latent.rank,),
        "kv_b_proj": (heads * (latent.plain_dim + latent.value_dim), latent.rank),
        "o_proj": (hidden, heads * latent.value_dim),
    }


def pieces_of(name: str, shape: tuple[int, ...], model: CheckpointShape, at: Coordinates) -> list[CheckpointSlice]:
    """List the checkpoint tensors, or parts of them, in one local tensor; they cover it except for vocabulary padding.

    `name` is that within ``GPTModel``, with the layer's number in the full model. Raises `KeyError` for a parameter that is in no
    supported model.
    """
    if model.valued and name.startswith("output_layer."):
        return [_all_of(name.replace("output_layer.", VALUE_HEAD), shape)]
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        return [_vocabulary(EMBEDDING if name.startswith("embedding") or model.tied else HEAD, shape, model, at)]
    if name == "decoder.final_layernorm.weight":
        return [_all_of(FINAL_NORM, shape)]
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.*)", name)
    if match is None:
        raise KeyError(name)
    return _layer_pieces(f"model.layers.{match[1]}", match[2], shape, model, at)


def _layer_pieces(
    layer: str, inner: str, shape: tuple[int, ...], model: CheckpointShape, at: Coordinates
) -> list[CheckpointSlice]:
    whole = _WHOLE | _LATENT_WHOLE if model.latent else _WHOLE
    if inner in whole:
        return [_all_of(f"{layer}.{whole[inner]}", shape)]
    if inner in _ROWS:
        return [_rows(f"{layer}.{_ROWS[inner]}", shape, at.tensor_rank)]
    kind = inner.removeprefix("self_attention.linear_qkv.")
    if kind == "weight" or (kind == "bias" and model.qkv_bias):
        return list(_attention(f"{layer}.self_attn", kind, shape, model, at.tensor_rank))
    if inner == "self_attention.linear_proj.weight":
        return [_columns(f"{layer}.self_attn.o_proj.weight", shape, at.tensor_rank)]
    expert = re.fullmatch(r"mlp\.experts\.local_experts\.(\d+)\.(linear_fc[12]\.weight)", inner)
    if expert:  # tensor parallelism does not split experts
        number = at.first_expert(model) + int(expert[1])
        return list(_feed_forward(f"{layer}.mlp.experts.{number}", expert[2], shape, 0))
    dense = re.fullmatch(r"mlp\.(shared_experts\.)?(linear_fc[12]\.weight)", inner)
    if dense:
        prefix = f"{layer}.mlp.{dense[1] or ''}".removesuffix(".")
        return list(_feed_forward(prefix, dense[2], shape, at.tensor_rank))
    raise KeyError(inner)


EXPERT_BIAS = "gate.e_score_correction_bias"


_WHOLE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": f"mlp.{EXPERT_BIAS}",
}
"""Tensors of a layer that every tensor parallel rank holds in full, and their names in the checkpoint."""

_LATENT_WHOLE = {
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
}
"""The same for multi-latent attention."""

_ROWS = {
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
}
"""Parameters of a layer that tensor parallelism splits by rows, without fused ones, and their names in the checkpoint."""


def _vocabulary(name: str, shape: tuple[int, ...], model: CheckpointShape, at: Coordinates) -> CheckpointSlice:
    first = min(at.tensor_rank * shape[0], model.vocab)
    rows = min(shape[0], model.vocab - first)
    return CheckpointSlice(name, (first, 0), Box((0, 0), (rows, shape[1])))


def _all_of(name: str, shape: tuple[int, ...]) -> CheckpointSlice:
    return CheckpointSlice(name, (0,) * len(shape), Box.whole(shape))


def _rows(name: str, shape: tuple[int, ...], rank: int) -> CheckpointSlice:
    return CheckpointSlice(name, (rank * shape[0], 0), Box.whole(shape))


def _columns(name: str, shape: tuple[int, ...], rank: int) -> CheckpointSlice:
    return CheckpointSlice(name, (0, rank * shape[1]), Box.whole(shape))


def _attention(
    prefix: str, kind: str, shape: tuple[int, ...], model: CheckpointShape, rank: int
) -> Iterator[CheckpointSlice]:
    """Yield the parts of the fused projection's weight [rows, columns] or bias [rows]."""
    columns, dim, queries = shape[1:], model.head_dim, model.queries
    local_groups = shape[0] // (queries + 2 * dim)
    for local in range(local_groups):
        group, row = rank * local_groups + local, local * (queries + 2 * dim)
        for of, rows in (("q", queries), ("k", dim), ("v", dim)):
            rest = (0,) * len(columns)
            box = Box((row, *rest), (rows, *columns))
            yield CheckpointSlice(f"{prefix}.{of}_proj.{kind}", (group * rows, *rest), box)
            row += rows


def _feed_forward(prefix: str, inner: str, shape: tuple[int, ...], rank: int) -> Iterator[CheckpointSlice]:
    if inner == "linear_fc2.weight":
        yield _columns(f"{prefix}.down_proj.weight", shape, rank)
        return
    rows = shape[0] // 2
    for index, kind in enumerate(("gate", "up")):
        yield CheckpointSlice(
            f"{prefix}.{kind}_proj.weight", (rank * rows, 0), Box((index * rows, 0), (rows, shape[1]))
        )
