"""Adapters of megatron-core's parallel linear layers, under the names of the Hugging Face layers that these fuse or split.

Each Hugging Face layer has its own A and B: ``linear_qkv`` has three pairs, and ``linear_fc1`` two. The outputs of the B's are
arranged like the rows of the fused matrix (see `checkpoint.names`). Ranks exchange only tensors of the adapter's rank. Each
expert's layers have their own, too, on the rank of expert parallelism that has the expert; all tokens of the expert are there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from weightlane.ckpt_engines import ConfigError

from ...config import LoraConfig, MegatronConfig
from ..lora.adapter import LoraGroups
from ..lora.adapters import PairOf
from ..lora.joint import LayerPair
from ..lora.sites import LoraSite, chosen_sites
from .checkpoint import CheckpointShape, Coordinates, checkpoint_shapes
from .layers import GroupedExperts, GroupedLinear
from .weights import unwrapped


@dataclass(frozen=True, slots=True)
class _Fused:
    """A linear layer of megatron-core, and the checkpoint's layers that it fuses, in the order of its rows."""

    linear: torch.nn.Module
    sites: tuple[LoraSite, ...]
    group_rows: tuple[int, ...]
    """Contiguous rows of each of `sites` in the fused matrix. A rank's rows are a sequence of groups, each with these rows.

    In grouped experts, these are the rows of one expert, and `sites` are those of one expert after the other.
    """
    cut: _Cut
    sequence_parallel: bool
    ranks: tuple[int, int] = (0, 1)
    """Rank and number of ranks of tensor parallelism, if each has rows of the gate and of up out of one fused layer's B."""


_Cut = Literal["rows", "columns", "", "expert"]
"""How tensor parallelism cuts a layer: by rows, by columns, or not at all.

A layer that is not cut is on every rank, each with its own positions under sequence parallelism, or in an ``expert``.
"""


def check_lora(model: CheckpointShape, config: LoraConfig) -> None:
    """Raise `ConfigError` for an adapter with a target that the model does not have."""
    _refuse_linear_attention(model)
    layers = _linear_layers(model).items()
    chosen_sites([LoraSite(name, *shape, (0, shape[0]), (0, shape[1])) for name, shape in layers], config)


def _refuse_linear_attention(model: CheckpointShape) -> None:
    if model.delta:
        raise ConfigError(
            "the megatron engine has no adapters for a model with linear attention.",
            part="lora adapter",
            hint="Use trainer.engine=fsdp2 for them, or train the weights themselves.",
        )


class MegatronAdapted:
    """megatron-core's layers on this rank, for `Adapters`."""

    def __init__(self, chunks: Sequence[Any], model: CheckpointShape, at: Coordinates, layout: MegatronConfig) -> None:
        self._chunks = [unwrapped(chunk) for chunk in chunks]
        self._model, self._at, self._sequence_parallel = model, at, layout.sequence_parallel
        self._linears = _linear_layers(model)
        self.weights = {f"{name}.weight": (name, 0) for name in self._linears}
        self.groups = LoraGroups(
            parallel_state.get_data_parallel_group(with_context_parallel=True),
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_model_parallel_group(),
            at.tensor_rank == 0,
            parallel_state.get_expert_data_parallel_group(),
            parallel_state.get_expert_tensor_model_pipeline_parallel_group(),
            layout.distributed_optimizer,
        )

    def install(self, pair_of: PairOf) -> tuple[list[LoraSite], dict[str, tuple[int, int]]]:
        """See `AdaptedModel.install`."""
        _refuse_linear_attention(self._model)
        layers = [
            fused for chunk in self._chunks for layer in chunk.decoder.layers for fused in self._fused_layers(layer)
        ]
        for fused in layers:
            fused.linear.register_forward_hook(_beside(fused, pair_of))
        for chunk in self._chunks:
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_ask_for_gradient)
        return [site for fused in layers for site in fused.sites], self._linears

    def _fused_layers(self, layer: Any) -> Iterator[_Fused]:
        """Yield the linear layers of one decoder layer."""
        model, prefix = self._model, f"model.layers.{layer.layer_number - 1}"
        yield from self._attention(layer.self_attention, f"{prefix}.self_attn")
        if not model.has_experts(layer.layer_number - 1):
            yield from self._feed_forward(layer.mlp, f"{prefix}.mlp", model.intermediate)
            return
        if model.gpt_oss:
            return  # as in transformers, its experts are no linear layers
        first, experts = self._at.first_expert(model), layer.mlp.experts
        if isinstance(experts, GroupedExperts):
            each = range(first, first + model.experts // self._at.expert_size)
            paths, rows = [f"{prefix}.mlp.experts.{number}" for number in each], model.expert_intermediate
            both = [f"{path}.{name}" for path in paths for name in ("gate_proj", "up_proj")]
            yield self._fused(experts.linear_fc1, both, (rows, rows), "expert")
            yield self._fused(experts.linear_fc2, [f"{path}.down_proj" for path in paths], (), "expert")
        else:
            for number, expert in enumerate(experts.local_experts, first):
                path = f"{prefix}.mlp.experts.{number}"
                yield from self._feed_forward(expert, path, model.expert_intermediate, "expert")
        if model.shared_intermediate:
            shared = layer.mlp.shared_experts
            yield from self._feed_forward(shared, f"{prefix}.mlp.shared_experts", model.shared_intermediate)

    def _attention(self, attention: Any, prefix: str) -> Iterator[_Fused]:
        model = self._model
        if model.latent is None:
            names = [f"{prefix}.{name}" for name in ("q_proj", "k_proj", "v_proj")]
            yield self._fused(attention.linear_qkv, names, (model.queries, model.head_dim, model.head_dim), "rows")
        else:
            projections: dict[str, tuple[str, _Cut]] = (
                {"q_a_proj": ("linear_q_down_proj", ""), "q_b_proj": ("linear_q_up_proj", "rows")}
                if model.latent.query_rank
                else {"q_proj": ("linear_q_proj", "rows")}
            )
            projections |= {
                "kv_a_proj_with_mqa": ("linear_kv_down_proj", ""),
                "kv_b_proj": ("linear_kv_up_proj", "rows"),
            }
            for name, (linear, cut) in projections.items():
                yield self._fused(getattr(attention, linear), [f"{prefix}.{name}"], (), cut)
        yield self._fused(attention.linear_proj, [f"{prefix}.o_proj"], (), "columns")

    def _feed_forward(self, mlp: Any, prefix: str, intermediate: int, kind: _Cut = "") -> Iterator[_Fused]:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        half = intermediate if kind else intermediate // ranks
        if self._model.fused_gate:
            whole = self._site(f"{prefix}.gate_up_proj", "rows", held_whole=True)
            place = self._at.tensor_rank, ranks
            yield _Fused(mlp.linear_fc1, (whole,), (2 * half,), "rows", self._sequence_parallel, place)
        else:
            both = [f"{prefix}.gate_proj", f"{prefix}.up_proj"]
            yield self._fused(mlp.linear_fc1, both, (half, half), kind or "rows")
        yield self._fused(mlp.linear_fc2, [f"{prefix}.down_proj"], (), kind or "columns")

    def _fused(self, linear: Any, names: Sequence[str], group_rows: tuple[int, ...], cut: _Cut) -> _Fused:
        """Describe a layer; empty `group_rows` for one that fuses nothing."""
        sites = tuple(self._site(name, cut) for name in names)
        return _Fused(linear, sites, group_rows or (sites[0].held_rows[1],), cut, self._sequence_parallel)

    def _site(self, module: str, cut: _Cut, *, held_whole: bool = False) -> LoraSite:
        """Describe an adapter's part on this rank; `held_whole` for a B of which it has all rows, and computes with some."""
        rows, columns = self._linears[module]
        split = (rows if cut == "rows" else columns) // parallel_state.get_tensor_model_parallel_world_size()
        part = (self._at.tensor_rank * split, split)
        held_rows, held_columns = part if cut == "rows" else (0, rows), part if cut == "columns" else (0, columns)
        # Each rank of sequence parallelism has the gradient of its own positions only. An expert's rank has that of all.
        positions = {"rows": "A", "columns": "B", "": "AB", "expert": ""}[cut] if self._sequence_parallel else ""
        if held_whole:
            held_rows, positions = (0, rows), f"{positions}B"
        return LoraSite(module, rows, columns, held_rows, held_columns, frozenset(positions), cut == "expert")


def _linear_layers(model: CheckpointShape) -> dict[str, tuple[int, int]]:
    """Return rows and columns of the linear layers in all decoder layers of the model, by name, in the checkpoint's order.

    The router is none of them, as in transformers.
    """
    inner = re.compile(r"model\.layers\.\d+\..+_(proj|mqa)\.weight")
    shapes = checkpoint_shapes(model).items()
    return {name.removesuffix(".weight"): (shape[0], shape[1]) for name, shape in shapes if inner.fullmatch(name)}


def _ask_for_gradient(module: Any, arguments: Any, output: torch.Tensor) -> None:
    """Make the output of a frozen embedding require a gradient.

    megatron-core's recomputation computes no gradients inside a layer whose input requires none.
    """
    del module, arguments
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _beside(fused: _Fused, pair_of: PairOf) -> Callable[[Any, Any, Any], Any]:
    """Return the hook that adds the adapters' output to that of a linear layer, which is a tensor and a bias."""
    add = _by_columns if fused.cut == "columns" else _by_rows
    if isinstance(fused.linear, GroupedLinear):
        add = _by_experts

    def hook(module: Any, arguments: Any, output: Any) -> Any:
        del module
        pairs = [pair_of(site.module) for site in fused.sites]
        if not any(pairs):
            return output
        tokens = arguments[0].flatten(0, -2)  # [tokens, 1, columns], whose runs may be of several adapters
        return output[0] + add(fused, pairs, tokens).view_as(output[0]), output[1]

    return hook


def _by_rows(fused: _Fused, pairs: Sequence[LayerPair | None], given: torch.Tensor) -> torch.Tensor:
    """Compute the adapters' output for a column parallel or uncut layer: [..., this rank's rows], from [..., columns].

    With sequence parallelism, the input is this rank's part of the sequence.
    """
    low = torch.cat([pair.lowered(given) for pair in pairs if pair is not None], dim=-1)
    if fused.cut != "rows":
        pass  # the input is all that this rank's rows are computed from
    elif fused.sequence_parallel:
        low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
    else:
        low = copy_to_tensor_model_parallel_region(low)
    lows = iter(torch.split(low, [pair.width for pair in pairs if pair is not None], dim=-1))
    groups = 1 if fused.ranks[1] > 1 else fused.sites[0].held_rows[1] // fused.group_rows[0]
    parts = []
    for pair, rows in zip(pairs, fused.group_rows, strict=True):
        if pair is None:
            parts.append(low.new_zeros(*low.shape[:-1], groups, rows))
            continue
        raised, (rank, ranks) = pair.raised(next(lows)), fused.ranks
        if ranks > 1:
            raised = raised.view(*low.shape[:-1], 2, ranks, -1)[..., rank, :].flatten(-2)
        parts.append(raised.view(*low.shape[:-1], groups, rows))
    return torch.cat(parts, dim=-1).flatten(-2)


def _by_experts(fused: _Fused, pairs: Sequence[LayerPair | None], given: torch.Tensor) -> torch.Tensor:
    """Compute the adapters' output for grouped experts: [tokens, rows], from [tokens, columns], sorted by expert."""
    assert isinstance(fused.linear, GroupedLinear)
    layers, counts = len(fused.group_rows), fused.linear.counts.tolist()
    parts = [
        _by_rows(fused, pairs[layers * expert : layers * (expert + 1)], tokens)
        for expert, tokens in enumerate(torch.split(given, counts))
    ]
    return torch.cat(parts)


def _by_columns(fused: _Fused, pairs: Sequence[LayerPair | None], given: torch.Tensor) -> torch.Tensor:
    """Compute the adapters' output for a row parallel layer: [..., rows], from [..., this rank's columns].

    With sequence parallelism, the output is this rank's part of the sequence.
    """
    (pair,) = pairs
    assert pair is not None  # else `_beside` would not have called this
    low = pair.lowered(given)
    if fused.sequence_parallel:
        return pair.raised(reduce_scatter_to_sequence_parallel_region(low))
    return pair.raised(reduce_from_tensor_model_parallel_region(low))
