"""Read a Hugging Face configuration for the megatron engine. Cheap: reads no weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError

from ...config import Head

_PART = "megatron engine"
_GLM = ("glm", "glm4")
_PLAIN = ("qwen2", "qwen3", "llama", "qwen3_moe", "qwen3_next", *_GLM)
_DEEPSEEK = ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Models with DeepSeek's shared and routed experts. ``glm4_moe`` does not have its multi-latent attention."""
_SUPPORTED = (*_PLAIN, *_DEEPSEEK, "gpt_oss")
_BIASED = ("glm4_moe", "gpt_oss", *_GLM)
"""Models whose ``attention_bias`` is computed as in transformers; beside the biases that Qwen2 has, GPT-OSS has others."""
_PARTLY_ROTATED = ("glm4_moe", "qwen3_next", *_GLM)
_SWIGLU_ALPHA = 1.702
"""The factor in GPT-OSS's activation; megatron-core's is fixed."""
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Settings that are fixed in megatron-core's scaling of rotary frequencies; only ``factor`` can be set."""


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
    qk_norm: bool = False
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


@dataclass(frozen=True, slots=True)
class Routing:
    """Settings of the routing of tokens to experts."""

    experts_per_token: int
    renormalize: bool
    """Whether the chosen experts' probabilities are scaled to sum to 1."""
    scores: str = "softmax"
    """``"softmax"`` or ``"sigmoid"``: the function of the router's logits that gives the experts' scores."""
    scale: float = 1.0
    """Factor by which routing probabilities are multiplied."""
    groups: int = 1
    """Number of groups of experts; a token chooses among the experts of `chosen_groups` groups."""
    chosen_groups: int = 1


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about a model that are known before it is built."""

    shape: CheckpointShape
    norm_eps: float
    rope_theta: float
    rope_factor: float | None
    """Factor of Llama 3's scaling of rotary frequencies; None without it."""
    max_positions: int
    rotary_share: float
    """Share of a head that is rotated."""
    rotary_interleaved: bool
    """Whether neighbours are rotated with each other, and not the halves of what is rotated."""
    routing: Routing | None
    """None without experts."""
    yarn: Mapping[str, float | None]
    """YaRN's scaling of rotary frequencies (arXiv 2309.00071), as megatron-core's settings; empty without."""
    windows: tuple[int | None, ...] = ()
    """Number of tokens that each one sees in each layer, itself included, None for all before it; empty for all in all layers."""
    activation_limit: float | None = None
    """Bound of the inputs of GPT-OSS's activation; None for SwiGLU."""


def read_model(model_dir: Path, head: Head = "tokens") -> ModelFacts:
    """Read ``config.json`` for a model with ``TrainerConfig.head`` `head`.

    Raises `ConfigError` for a model that this engine would compute differently from transformers.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - slow to import
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415 - as above
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    )

    config: Any = AutoConfig.from_pretrained(model_dir, local_files_only=True)

    def refuse(what: str) -> ConfigError:
        return ConfigError(
            f"the model in {model_dir} {what}, which the megatron engine does not support.",
            part=_PART,
            hint="Use trainer.engine=fsdp2 for it.",
        )

    if getattr(config, "quantization_config", None):
        raise refuse("has quantised weights")
    if config.model_type not in _SUPPORTED:
        raise refuse(f"is a {config.model_type} model (supported: {', '.join(_SUPPORTED)})")
    if head == "value" and config.model_type not in MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES:
        raise refuse(f"is a {config.model_type} model, of which transformers has no critic")
    if config.hidden_act != "silu":
        raise refuse(f"has the activation {config.hidden_act}")
    if (getattr(config, "attention_bias", False) and config.model_type not in _BIASED) or getattr(
        config, "mlp_bias", False
    ):
        raise refuse("has biases in its linear layers")
    gpt_oss = config.model_type == "gpt_oss"
    layer_types = getattr(config, "layer_types", None) or ()
    linear = {"linear_attention"} if config.model_type == "qwen3_next" else set()
    if (set(layer_types) - {"full_attention"} - linear and not gpt_oss) or getattr(config, "use_sliding_window", False):
        raise refuse("has sliding windows")
    if getattr(config, "attention_dropout", 0.0):
        raise refuse("has dropout")
    rope = dict(config.rope_parameters)
    read = _gpt_oss if gpt_oss else _deepseek if config.model_type in _DEEPSEEK else _plain
    shape, routing = read(config, refuse)
    if head == "value":
        shape = replace(shape, valued=True, tied=False)
    return ModelFacts(
        shape,
        norm_eps=config.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        rope_factor=_llama3_factor(rope, shape, refuse),
        max_positions=config.max_position_embeddings,
        rotary_share=float(rope.get("partial_rotary_factor") or 1) if config.model_type in _PARTLY_ROTATED else 1.0,
        rotary_interleaved=config.model_type in _GLM,
        routing=routing,
        yarn=_yarn(rope, shape, refuse),
        windows=tuple(config.sliding_window if kind == "sliding_attention" else None for kind in layer_types)
        if gpt_oss
        else (),
        activation_limit=float(config.swiglu_limit) if gpt_oss else None,
    )


_Refuse = Callable[[str], ConfigError]


def _shape(config: Any, **more: Any) -> CheckpointShape:
    """Return the sizes that configurations name alike; `more` are the others, and replace those."""
    heads = config.num_attention_heads
    alike = {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": heads,
        "groups": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "vocab": config.vocab_size,
        "tied": bool(config.tie_word_embeddings),
    }
    return CheckpointShape(**{**alike, **more})


def _plain(config: Any, refuse: _Refuse) -> tuple[CheckpointShape, Routing | None]:
    """Read the configuration of Qwen2, Qwen3, Llama, Qwen3-MoE, Qwen3-Next, GLM or GLM-4."""
    gated = config.model_type == "qwen3_next"
    moe = gated or config.model_type == "qwen3_moe"
    if moe and (config.mlp_only_layers or config.decoder_sparse_step != 1):
        raise refuse("has layers without experts among those with experts")
    shape = _shape(
        config,
        intermediate=0 if moe else config.intermediate_size,
        qk_norm=config.model_type.startswith("qwen3"),
        qkv_bias=config.model_type == "qwen2" or bool(getattr(config, "attention_bias", False)),
        experts=config.num_experts if moe else 0,
        expert_intermediate=config.moe_intermediate_size if moe else 0,
        shared_intermediate=config.shared_expert_intermediate_size if gated else 0,
        delta=_delta(config) if gated else None,
        fused_gate=config.model_type in _GLM,
        output_norms=config.model_type == "glm4",
    )
    return shape, Routing(config.num_experts_per_tok, bool(config.norm_topk_prob)) if moe else None


def _delta(config: Any) -> DeltaShape:
    return DeltaShape(
        layers=frozenset(number for number, kind in enumerate(config.layer_types) if kind == "linear_attention"),
        key_heads=config.linear_num_key_heads,
        value_heads=config.linear_num_value_heads,
        key_dim=config.linear_key_head_dim,
        value_dim=config.linear_value_head_dim,
        kernel=config.linear_conv_kernel_dim,
    )


def _gpt_oss(config: Any, refuse: _Refuse) -> tuple[CheckpointShape, Routing]:
    """Read the configuration of GPT-OSS."""
    if not config.attention_bias:
        raise refuse("has no biases in its attention")
    if config.swiglu_alpha != _SWIGLU_ALPHA:
        raise refuse(f"has swiglu_alpha={config.swiglu_alpha:g}")
    shape = _shape(
        config,
        intermediate=0,
        qkv_bias=True,
        experts=config.num_local_experts,
        expert_intermediate=config.intermediate_size,
        gpt_oss=True,
    )
    return shape, Routing(config.num_experts_per_tok, renormalize=True)


def _deepseek(config: Any, refuse: _Refuse) -> tuple[CheckpointShape, Routing]:
    """Read the configuration of DeepSeek-V2, or of V3 and GLM-4, which score experts by sigmoids and choose with a bias."""
    third, latent = config.model_type != "deepseek_v2", config.model_type != "glm4_moe"
    layers, dense = config.num_hidden_layers, _dense_layers(config, refuse)
    if dense >= layers:
        raise refuse("has no layer with experts")
    if third and latent and not config.rope_interleave:
        raise refuse("has rotary embeddings that are not interleaved")
    if third is not bool(config.norm_topk_prob):
        raise refuse(f"has norm_topk_prob={str(bool(config.norm_topk_prob)).lower()}")
    if config.num_experts_per_tok == 1 and third:
        raise refuse("has one expert for each token, whose weight is scaled to 1")
    groups, chosen, choices = config.n_group or 1, config.topk_group or 1, config.num_experts_per_tok
    grouped = groups > chosen and (third or config.topk_method != "greedy")
    # transformers ranks groups by their two best experts, or by the best one; megatron-core by as many as a token uses of each.
    if grouped and choices // chosen != (2 if third else 1):
        raise refuse(f"chooses {choices} experts in {chosen} of {groups} groups")
    attention: dict[str, Any] = {}
    if latent:
        sizes = LatentShape(
            query_rank=config.q_lora_rank or 0,
            rank=config.kv_lora_rank,
            plain_dim=config.qk_nope_head_dim,
            rotary_dim=config.qk_rope_head_dim,
            value_dim=config.v_head_dim,
        )
        head_dim = sizes.plain_dim + sizes.rotary_dim
        attention = {"latent": sizes, "groups": config.num_attention_heads, "head_dim": head_dim}
    else:
        attention = {"qk_norm": bool(config.use_qk_norm), "qkv_bias": bool(config.attention_bias)}
    shape = _shape(
        config,
        intermediate=config.intermediate_size if dense else 0,
        experts=config.n_routed_experts,
        expert_intermediate=config.moe_intermediate_size,
        dense_layers=dense,
        shared_intermediate=config.moe_intermediate_size * config.n_shared_experts,
        expert_bias=third,
        **attention,
    )
    routing = Routing(
        choices,
        renormalize=third,
        scores="sigmoid" if third else "softmax",
        scale=float(config.routed_scaling_factor),
        groups=groups if grouped else 1,
        chosen_groups=chosen if grouped else 1,
    )
    return shape, routing


def _dense_layers(config: Any, refuse: _Refuse) -> int:
    """Return the number of layers without experts, which are the first ones."""
    if config.model_type != "glm4_moe_lite":
        return int(config.first_k_dense_replace)
    kinds = list(config.mlp_layer_types)
    dense = kinds.count("dense")
    if "sparse" in kinds[:dense]:
        raise refuse("has layers without experts among those with experts")
    return dense


def _llama3_factor(rope: Mapping[str, Any], shape: CheckpointShape, refuse: _Refuse) -> float | None:
    kind, usual = rope["rope_type"], all(rope.get(key) == value for key, value in _LLAMA3_ROPE.items())
    if kind == "llama3" and usual and not shape.latent:
        return float(rope["factor"])
    if kind in ("default", "yarn"):
        return None
    raise refuse(f"scales its rotary embedding by {dict(rope)}")


def _yarn(rope: Mapping[str, Any], shape: CheckpointShape, refuse: _Refuse) -> dict[str, float | None]:
    if rope["rope_type"] != "yarn":
        return {}
    mscales = {key: float(rope.get(key) or 0) or None for key in ("mscale", "mscale_all_dim")}
    rounded = rope.get("truncate") is not False
    fixed = shape.latent and (None in mscales.values() or not rounded)  # megatron-core has no setting for this
    if fixed or "attention_factor" in rope or "original_max_position_embeddings" not in rope:
        raise refuse(f"scales its rotary embedding by {dict(rope)}")
    return {
        "rotary_scaling_factor": float(rope["factor"]),
        "original_max_position_embeddings": int(rope["original_max_position_embeddings"]),
        "beta_fast": float(rope.get("beta_fast") or 32),
        "beta_slow": float(rope.get("beta_slow") or 1),
        **mscales,
        **({} if shape.latent else {"correction_range_round_to_int": rounded}),
    }
