"""The tensors of known models, without their weights, for plans without a run.

Sizes are those of the models' published ``config.json`` files, names those of their checkpoints on Hugging Face.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from weightlane.ckpt_engines import ConfigError

from ...version.tensor_spec import TensorSpec

Cut = Literal["whole", "rows", "columns", "kv_heads"]
"""How tensor-parallel ranks divide a matrix. ``"kv_heads"`` is by rows, with at least one head for each rank."""


@dataclass(frozen=True, slots=True)
class LatentAttentionShape:
    """Ranks and head sizes of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434)."""

    query_rank: int
    kv_rank: int
    nope: int
    rope: int
    value: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a mixture-of-experts decoder."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head: int
    vocabulary: int
    experts: int
    expert_width: int
    dense_layers: int = 0
    """Number of first layers that have one wide feed-forward network instead of experts."""
    dense_width: int = 0
    shared_experts: int = 0
    latent: LatentAttentionShape | None = None


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of a checkpoint, and how parallel ranks divide it."""

    spec: TensorSpec
    cut: Cut
    layer: int
    """The layer; -1 before the first layer, `ModelShape.layers` after the last."""
    expert: int | None = None
    units: int = 1
    """Number of heads, for ``"kv_heads"``."""


SHAPES: dict[str, ModelShape] = {
    "30b": ModelShape("Qwen3-30B-A3B", 48, 2048, 32, 4, 128, 151936, 128, 768),
    "235b": ModelShape("Qwen3-235B-A22B", 94, 4096, 64, 4, 128, 151936, 128, 1536),
    "1t": ModelShape(
        "1T MoE",
        layers=61,
        hidden=7168,
        heads=64,
        kv_heads=64,
        head=128,
        vocabulary=163840,
        experts=384,
        expert_width=2048,
        dense_layers=1,
        dense_width=18432,
        shared_experts=1,
        latent=LatentAttentionShape(1536, 512, 128, 64, 128),
    ),
}
"""Known models by their name in ``weightlane plan-shape``. ``1t`` has the sizes of Kimi K2."""


def shape_named(name: str) -> ModelShape:
    """The model of `SHAPES` with this name. Raises `ConfigError` for an unknown name."""
    try:
        return SHAPES[name.lower()]
    except KeyError:
        raise ConfigError(
            f"{name!r} is no shape that is known.",
            part="plan",
            hint=f"Known: {', '.join(SHAPES)}. The plan of a run: weightlane plan CONFIG.",
        ) from None


def weights(shape: ModelShape) -> Iterator[Weight]:
    """Every tensor in bfloat16, layer by layer."""

    def of(name: str, *size: int, cut: Cut = "whole", layer: int, expert: int | None = None, units: int = 1) -> Weight:
        return Weight(TensorSpec(name, size, torch.bfloat16), cut, layer, expert, units)

    def feed_forward(module: str, width: int, layer: int, expert: int | None = None) -> Iterator[Weight]:
        yield of(f"{module}.gate_proj.weight", width, shape.hidden, cut="rows", layer=layer, expert=expert)
        yield of(f"{module}.up_proj.weight", width, shape.hidden, cut="rows", layer=layer, expert=expert)
        yield of(f"{module}.down_proj.weight", shape.hidden, width, cut="columns", layer=layer, expert=expert)

    yield of("model.embed_tokens.weight", shape.vocabulary, shape.hidden, cut="rows", layer=-1)
    for layer in range(shape.layers):
        here = f"model.layers.{layer}"
        yield of(f"{here}.input_layernorm.weight", shape.hidden, layer=layer)
        for name, size, cut, units in _attention(shape):
            yield of(f"{here}.self_attn.{name}.weight", *size, cut=cut, layer=layer, units=units)
        yield of(f"{here}.post_attention_layernorm.weight", shape.hidden, layer=layer)
        if layer < shape.dense_layers:
            yield from feed_forward(f"{here}.mlp", shape.dense_width, layer)
            continue
        yield of(f"{here}.mlp.gate.weight", shape.experts, shape.hidden, layer=layer)
        if shape.latent is not None:  # this family's routers have a bias
            yield of(f"{here}.mlp.gate.e_score_correction_bias", shape.experts, layer=layer)
        for expert in range(shape.experts):
            yield from feed_forward(f"{here}.mlp.experts.{expert}", shape.expert_width, layer, expert)
        if shape.shared_experts:
            yield from feed_forward(f"{here}.mlp.shared_experts", shape.shared_experts * shape.expert_width, layer)
    yield of("model.norm.weight", shape.hidden, layer=shape.layers)
    yield of("lm_head.weight", shape.vocabulary, shape.hidden, cut="rows", layer=shape.layers)


def _attention(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...], Cut, int]]:
    heads, hidden = shape.heads, shape.hidden
    if (latent := shape.latent) is not None:
        yield "q_a_proj", (latent.query_rank, hidden), "whole", 1
        yield "q_a_layernorm", (latent.query_rank,), "whole", 1
        yield "q_b_proj", (heads * (latent.nope + latent.rope), latent.query_rank), "rows", 1
        yield "kv_a_proj_with_mqa", (latent.kv_rank + latent.rope, hidden), "whole", 1
        yield "kv_a_layernorm", (latent.kv_rank,), "whole", 1
        yield "kv_b_proj", (heads * (latent.nope + latent.value), latent.kv_rank), "rows", 1
        yield "o_proj", (hidden, heads * latent.value), "columns", 1
        return
    yield "q_proj", (heads * shape.head, hidden), "rows", 1
    for name in ("k_proj", "v_proj"):
        yield name, (shape.kv_heads * shape.head, hidden), "kv_heads", shape.kv_heads
    yield "o_proj", (hidden, heads * shape.head), "columns", 1
    for name in ("q_norm", "k_norm"):
        yield name, (shape.head,), "whole", 1
