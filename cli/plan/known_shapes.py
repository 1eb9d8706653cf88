"""The tensors of known models, and the placements of their ranks in common parallel layouts, for plans without a run.

Sizes are those of the models' published ``config.json`` files, names those of their checkpoints on Hugging Face. A layout is
written as ``pp8 ep32`` or ``8x tp16 ep16``: one word for each kind of parallelism, with its number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.box import Box
from weightlane.sync.version.placement import Placement
from weightlane.sync.version.tensor_spec import TensorSpec

_PART = "plan"
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
            part=_PART,
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


_WORD = re.compile(r"([a-z]+)(\d+)|(\d+)(x)")
_MOST_RANKS = 1 << 16
"""Limit for the ranks of a layout, so that a typing error does not take all memory."""

USUAL: dict[str, tuple[str, str]] = {
    "30b": ("fsdp32", "8x tp2"),
    "235b": ("pp4 tp4 ep8 dp2", "4x tp8 ep8"),
    "1t": ("pp8 ep32", "8x tp16 ep16"),
}
"""Usual layouts of trainer and rollout ranks for each model of `SHAPES`."""


@dataclass(frozen=True, slots=True)
class TrainerLayout:
    """The layout of trainer ranks, of one of two kinds.

    Megatron's kind has pipeline stages of `tp` x `dp` ranks. All tensors but experts are sharded over `tp` and replicated over
    `dp`; complete experts are distributed over `ep` ranks of a stage. FSDP's kind has `dp` groups of `fsdp` ranks, which shard
    every parameter along its first dimension. The first dimension of fused experts is the expert.
    """

    pp: int = 1
    tp: int = 1
    ep: int = 1
    dp: int = 1
    fsdp: int = 1

    @classmethod
    def parse(cls, text: str) -> TrainerLayout:
        """Parse words such as ``pp8 ep32``. Without ``dp`` there are as few replicas as `ep` needs. Raises `ConfigError`."""
        sizes = _words(text, ("pp", "tp", "ep", "dp", "fsdp"), "--trainer")
        if "fsdp" in sizes and sizes.keys() & {"pp", "tp", "ep"}:
            raise _bad("--trainer", text, "fsdp goes with dp only")
        tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)
        if "fsdp" not in sizes:
            sizes.setdefault("dp", -(-ep // tp))
            if (tp * sizes["dp"]) % ep:
                raise _bad("--trainer", text, f"{ep} ranks do not share the experts of a stage of {tp * sizes['dp']}")
        layout = cls(**sizes)
        if layout.ranks > _MOST_RANKS:
            raise _bad("--trainer", text, f"these are {layout.ranks} ranks, more than {_MOST_RANKS}")
        return layout

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.pp * self.tp * self.dp * self.fsdp

    def placements(self, shape: ModelShape, weights: Sequence[Weight]) -> dict[str, Placement]:
        """The slices that each rank holds, by name. Raises `ConfigError` where the layout does not fit the model."""
        _check_experts("--trainer", shape, self.ep)
        if self.pp > shape.layers:
            raise ConfigError(
                f"{shape.layers} layers are not shared by {self.pp} stages.", part=_PART, hint="Lower pp of --trainer."
            )
        held = self._sharded(shape, weights) if self.fsdp > 1 else self._in_stages(shape, weights)
        return {f"trainer-{rank}": placement for rank, placement in enumerate(held)}

    def _in_stages(self, shape: ModelShape, weights: Sequence[Weight]) -> Iterator[Placement]:
        stage_of = _stages(shape.layers, self.pp)
        stages: list[list[Weight]] = [[] for _ in range(self.pp)]
        for weight in weights:
            stages[stage_of[min(max(weight.layer, 0), shape.layers - 1)]].append(weight)
        for stage in stages:
            for index in range(self.dp * self.tp):
                yield _of_rank(stage, self.tp, index % self.tp, _experts(shape, self.ep, index % self.ep))

    def _sharded(self, shape: ModelShape, weights: Sequence[Weight]) -> Iterator[Placement]:
        for _ in range(self.dp):
            for index in range(self.fsdp):
                slices = []
                for weight in weights:
                    if weight.expert is None:
                        slices.append((weight.spec, _part(weight.spec.shape, 0, self.fsdp, index)))
                    elif weight.expert // -(-shape.experts // self.fsdp) == index:  # the fused tensor's first dimension
                        slices.append((weight.spec, _whole(weight.spec.shape)))
                yield _placement(slices)


@dataclass(frozen=True, slots=True)
class RolloutLayout:
    """Replicas of `tp` ranks each. With `ep`, complete experts are distributed over these ranks instead of being sharded."""

    replicas: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def parse(cls, text: str) -> RolloutLayout:
        """Parse words such as ``8x tp16 ep16``. Raises `ConfigError`."""
        sizes = _words(text, ("x", "tp", "ep"), "--rollout")
        layout = cls(sizes.get("x", 1), sizes.get("tp", 1), sizes.get("ep", 1))
        if layout.ep not in (1, layout.tp):
            raise _bad("--rollout", text, "ep is 1 or the same as tp")
        if layout.ranks > _MOST_RANKS:
            raise _bad("--rollout", text, f"these are {layout.ranks} ranks, more than {_MOST_RANKS}")
        return layout

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.replicas * self.tp

    def placements(self, shape: ModelShape, weights: Sequence[Weight]) -> dict[str, Placement]:
        """The slices that each rank needs, by name; replicas need the same. Raises `ConfigError` if the layout does not fit."""
        _check_experts("--rollout", shape, self.ep)
        by_rank = [
            _of_rank(weights, self.tp, rank, _experts(shape, self.ep, rank % self.ep), cut_experts=self.ep == 1)
            for rank in range(self.tp)
        ]
        return {
            f"rollout-{replica}/{rank}": by_rank[rank]
            for replica, rank in product(range(self.replicas), range(self.tp))
        }


def _of_rank(
    weights: Sequence[Weight], ranks: int, rank: int, experts: range, *, cut_experts: bool = False
) -> Placement:
    """The slices of one of `ranks` tensor-parallel ranks, with `experts` in full, or with its part of each if `cut_experts`."""
    slices = []
    for weight in weights:
        if weight.expert is None or weight.expert in experts:
            whole = weight.expert is not None and not cut_experts
            slices.append((weight.spec, _whole(weight.spec.shape) if whole else cut(weight, ranks, rank)))
    return _placement(slices)


def cut(weight: Weight, ranks: int, rank: int) -> Box:
    """The slice of a tensor that rank `rank` of `ranks` tensor-parallel ranks has."""
    if weight.cut == "whole" or ranks == 1:
        return _whole(weight.spec.shape)
    if weight.cut == "columns":
        return _part(weight.spec.shape, 1, ranks, rank)
    if weight.cut == "kv_heads" and weight.units < ranks:
        return _part(weight.spec.shape, 0, weight.units, rank * weight.units // ranks)
    return _part(weight.spec.shape, 0, ranks, rank)


@cache
def _part(shape: tuple[int, ...], axis: int, ranks: int, rank: int) -> Box:
    size = -(-shape[axis] // ranks)
    first = min(rank * size, shape[axis])
    return Box.whole(shape).with_axis(axis, first, min(size, shape[axis] - first))


@cache
def _whole(shape: tuple[int, ...]) -> Box:
    return Box.whole(shape)


def _placement(slices: Sequence[tuple[TensorSpec, Box]]) -> Placement:
    """The placement with one slice of each tensor."""
    return Placement(tuple(spec for spec, _ in slices), tuple((box,) if box.numel else () for _, box in slices))


def _experts(shape: ModelShape, ranks: int, rank: int) -> range:
    each = shape.experts // ranks
    return range(rank * each, (rank + 1) * each)


def _stages(layers: int, stages: int) -> list[int]:
    """The stage of each layer. Stages have equally many layers, or the first ones one more."""
    each, more = divmod(layers, stages)
    return [stage for stage in range(stages) for _ in range(each + (stage < more))]


def _check_experts(option: str, shape: ModelShape, ranks: int) -> None:
    if shape.experts % ranks:
        raise ConfigError(
            f"{shape.experts} experts are not shared by {ranks} ranks.", part=_PART, hint=f"Change ep of {option}."
        )


def _words(text: str, known: Sequence[str], option: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for word in text.lower().split():
        found = _WORD.fullmatch(word)
        kind = (found[1] or found[4]) if found else ""
        if found is None or kind not in known:
            raise _bad(option, text, f"{word!r} is no part of a layout")
        if kind in sizes:
            raise _bad(option, text, f"{kind} is given twice")
        sizes[kind] = int(found[2] or found[3])
        if not 1 <= sizes[kind] <= _MOST_RANKS:
            raise _bad(option, text, f"{word!r} has no valid number of ranks")
    return sizes


def _bad(option: str, text: str, why: str) -> ConfigError:
    example = "pp8 ep32, tp2 pp4 dp8, or fsdp64" if option == "--trainer" else "8x tp16 ep16"
    return ConfigError(f"{option} {text!r}: {why}.", part=_PART, hint=f"Write it like {example}.")
