"""The sizes of a model, and the names and shapes of its tensors in a Hugging Face checkpoint."""

from __future__ import annotations

from dataclasses import dataclass

EMBEDDING, HEAD, FINAL_NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
VALUE_HEAD = "score."
"""Prefix of the names of a critic's weight and bias."""
EXPERT_BIAS = "gate.e_score_correction_bias"
_OUTPUT_NORMS = ("post_self_attn_layernorm.weight", "post_mlp_layernorm.weight")


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
class DeltaShape:
    """The sizes of Qwen3-Next's linear attention by the gated delta rule (arXiv 2412.06464)."""

    layers: frozenset[int]
    """Layers that have it in the place of attention, counted from 0."""
    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: as many heads of values share a head of queries and keys."""
    key_dim: int
    """Size of a head of queries and keys."""
    value_dim: int
    kernel: int
    """Tokens that the convolution of queries, keys and values sees."""

    @property
    def convolved(self) -> tuple[int, int, int]:
        """Rows of all queries, keys and values."""
        keys = self.key_heads * self.key_dim
        return keys, keys, self.value_heads * self.value_dim


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
    fused_gate: bool = False
    """Whether ``gate_proj`` and ``up_proj`` are one tensor ``gate_up_proj``, the gate's rows first."""
    output_norms: bool = False
    """Whether the outputs of attention and feed-forward layers are normalised, too, before they are added."""
    gpt_oss: bool = False
    """Whether heads have sinks, all layers biases, and experts are stacked in tensors [experts, columns, rows], as in GPT-OSS."""
    delta: DeltaShape | None = None
    """Sizes of linear attention; None without it. With it, attention and shared experts have gates of their outputs."""
    valued: bool = False
    """Whether it is a critic: its head has one row and a bias, and `tied` is False."""
    latent: LatentShape | None = None
    """Sizes of multi-latent attention, with which `groups` and `head_dim` have no meaning; None without it."""

    def has_experts(self, layer: int) -> bool:
        """Whether a decoder layer, counted from 0, has experts."""
        return bool(self.experts) and layer >= self.dense_layers

    def is_linear(self, layer: int) -> bool:
        """Whether a decoder layer, counted from 0, has linear attention."""
        return self.delta is not None and layer in self.delta.layers

    @property
    def shared_experts(self) -> str:
        """Name of the shared experts within a layer's ``mlp``."""
        return "shared_expert" if self.delta else "shared_experts"

    @property
    def queries(self) -> int:
        """Rows of one group's queries."""
        return self.heads // self.groups * self.head_dim


Shapes = dict[str, tuple[int, ...]]


def checkpoint_shapes(model: CheckpointShape) -> Shapes:
    """Return the shape of every checkpoint tensor by name, in the order in which ranks list them."""
    norm = (model.hidden,)
    shapes: Shapes = {EMBEDDING: (model.vocab, model.hidden)}
    for index in range(model.layers):
        attention = _delta_shapes(model) if model.is_linear(index) else _attention_shapes(model)
        layer: Shapes = {
            "input_layernorm.weight": norm,
            **attention,
            "post_attention_layernorm.weight": norm,
            **(dict.fromkeys(_OUTPUT_NORMS, norm) if model.output_norms else {}),
            **_feed_forward_shapes(model, index),
        }
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return {**shapes, FINAL_NORM: norm, **_head_shapes(model)}


def _head_shapes(model: CheckpointShape) -> Shapes:
    if model.valued:
        return {f"{VALUE_HEAD}weight": (1, model.hidden), f"{VALUE_HEAD}bias": (1,)}
    return {} if model.tied else {HEAD: (model.vocab, model.hidden)}


def _feed_forward_shapes(model: CheckpointShape, index: int) -> Shapes:
    """Return the shapes of layer `index`'s feed-forward tensors by name within the layer."""
    hidden, experts, inner = model.hidden, model.experts, model.expert_intermediate

    def linears(prefix: str, intermediate: int) -> Shapes:
        rows = {"gate_up": 2 * intermediate} if model.fused_gate else {"gate": intermediate, "up": intermediate}
        return {
            **{f"{prefix}.{name}_proj.weight": (count, hidden) for name, count in rows.items()},
            f"{prefix}.down_proj.weight": (hidden, intermediate),
        }

    if not model.has_experts(index):
        return linears("mlp", model.intermediate)
    if model.gpt_oss:
        return {
            "mlp.router.weight": (experts, hidden),
            "mlp.router.bias": (experts,),
            "mlp.experts.gate_up_proj": (experts, hidden, 2 * inner),
            "mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
            "mlp.experts.down_proj": (experts, inner, hidden),
            "mlp.experts.down_proj_bias": (experts, hidden),
        }
    shapes: Shapes = {"mlp.gate.weight": (experts, hidden)}
    if model.expert_bias:
        shapes[f"mlp.{EXPERT_BIAS}"] = (experts,)
    for expert in range(experts):
        shapes |= linears(f"mlp.experts.{expert}", inner)
    if model.shared_intermediate:
        shapes |= linears(f"mlp.{model.shared_experts}", model.shared_intermediate)
    if model.delta:
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _delta_shapes(model: CheckpointShape) -> Shapes:
    """Return the shapes of one layer's linear attention by name within the layer."""
    delta, hidden = model.delta, model.hidden
    assert delta is not None
    rows = sum(delta.convolved)
    values = delta.convolved[2]
    return {
        "linear_attn.dt_bias": (delta.value_heads,),
        "linear_attn.A_log": (delta.value_heads,),
        "linear_attn.conv1d.weight": (rows, 1, delta.kernel),
        "linear_attn.in_proj_qkvz.weight": (rows + values, hidden),
        "linear_attn.in_proj_ba.weight": (2 * delta.value_heads, hidden),
        "linear_attn.norm.weight": (delta.value_dim,),
        "linear_attn.out_proj.weight": (hidden, values),
    }


def _attention_shapes(model: CheckpointShape) -> Shapes:
    """Return the shapes of one layer's attention tensors by name within the layer."""
    found: Shapes = {}
    biased = ("q_proj", "k_proj", "v_proj") if model.qkv_bias else ()
    for name, shape in _projection_shapes(model).items():
        found[f"self_attn.{name}.weight"] = shape
        if name in biased or (model.gpt_oss and name == "o_proj"):
            found[f"self_attn.{name}.bias"] = shape[:1]
    return {**found, "self_attn.sinks": (model.heads,)} if model.gpt_oss else found


def _projection_shapes(model: CheckpointShape) -> Shapes:
    """Return the shapes of one layer's attention weights by name within ``self_attn``, without ``.weight``."""
    hidden, heads, latent = model.hidden, model.heads, model.latent
    if latent is None:
        rows, groups = heads * model.head_dim, model.groups * model.head_dim
        norms = {"q_norm": (model.head_dim,), "k_norm": (model.head_dim,)} if model.qk_norm else {}
        asked = 2 * rows if model.delta else rows
        projections = {"q_proj": (asked, hidden), "k_proj": (groups, hidden), "v_proj": (groups, hidden)}
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
