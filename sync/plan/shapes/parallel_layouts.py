"""Common parallel layouts, and the placements of their ranks for a model of `shapes`, without a run.

A layout is written as ``pp8 ep32`` or ``8x tp16 ep16``: one word for each kind of parallelism, with its number of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from weightlane.ckpt_engines import ConfigError

from ...version.box import Box
from ...version.placement import Placement
from ...version.tensor_spec import TensorSpec
from .model_shapes import ModelShape, Weight

_PART = "plan"
_WORD = re.compile(r"([a-z]+)(\d+)|(\d+)(x)")
_MOST_RANKS = 1 << 16
"""Limit for the ranks of a layout, so that a typing error does not take all memory."""

USUAL: dict[str, tuple[str, str]] = {
    "30b": ("fsdp32", "8x tp2"),
    "235b": ("pp4 tp4 ep8 dp2", "4x tp8 ep8"),
    "1t": ("pp8 ep32", "8x tp16 ep16"),
}
"""Usual layouts of trainer and rollout ranks for each model of `weightlane.sync.plan.shapes.model_shapes.SHAPES`."""


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
        held = self._sharded(shape, weights) if self.fsdp > 1 else self._in_stages(shape, weights)
        return {f"trainer-{rank}": placement for rank, placement in enumerate(held)}

    def _in_stages(self, shape: ModelShape, weights: Sequence[Weight]) -> Iterator[Placement]:
        stage_of = _stages(shape.layers, self.pp)
        stages: list[list[Weight]] = [[] for _ in range(self.pp)]
        for weight in weights:
            stages[stage_of[min(max(weight.layer, 0), shape.layers - 1)]].append(weight)
        for stage in stages:
            cut = _Slices(stage, self.tp)
            for index in range(self.dp * self.tp):
                yield cut.placement(index % self.tp, _experts(shape, self.ep, index % self.ep))

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
        cut = _Slices(weights, self.tp)
        by_rank = [
            cut.placement(rank, _experts(shape, self.ep, rank % self.ep), cut_experts=self.ep == 1)
            for rank in range(self.tp)
        ]
        return {
            f"rollout-{replica}/{rank}": by_rank[rank]
            for replica, rank in product(range(self.replicas), range(self.tp))
        }


class _Slices:
    """The tensors of one group of tensor-parallel ranks."""

    def __init__(self, weights: Sequence[Weight], ranks: int) -> None:
        self._shared = [weight for weight in weights if weight.expert is None]
        self._experts = [weight for weight in weights if weight.expert is not None]
        self._ranks = ranks

    def placement(self, rank: int, experts: range, *, cut_experts: bool = False) -> Placement:
        """The slices of one rank, with `experts` in full, or with its part of each of them if `cut_experts` is set."""
        slices = [(weight.spec, cut(weight, self._ranks, rank)) for weight in self._shared]
        mine = [weight for weight in self._experts if weight.expert in experts]
        if cut_experts:
            slices += [(weight.spec, cut(weight, self._ranks, rank)) for weight in mine]
        else:
            slices += [(weight.spec, _whole(weight.spec.shape)) for weight in mine]
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
