"""Adapters of megatron-core's parallel linear layers, under the names of the Hugging Face layers that these fuse or split.

Each Hugging Face layer has its own A and B: ``linear_qkv`` has three pairs, and ``linear_fc1`` two. The outputs of the B's are
arranged like the rows of the fused matrix (see `checkpoint_names`). Ranks exchange only tensors of the adapter's rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import (
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)

from weightlane.ckpt_engines import ConfigError

from ...config import LoraConfig
from ..lora.adapter import LoraGroups
from ..lora.adapters import PairOf
from ..lora.joint import LayerPair
from ..lora.sites import LoraSite, chosen_sites
from .checkpoint_names import CheckpointShape, checkpoint_shapes
from .weights import unwrapped


@dataclass(frozen=True, slots=True)
class _Fused:
    """A linear layer of megatron-core, and the checkpoint's layers that it fuses, in the order of its rows."""

    linear: torch.nn.Module
    sites: tuple[LoraSite, ...]
    group_rows: tuple[int, ...]
    """Contiguous rows of each of `sites` in the fused matrix. A rank's rows are a sequence of groups, each with these rows."""
    by_rows: bool
    """Whether tensor parallelism splits the layer by rows."""
    sequence_parallel: bool


def check_lora(model: CheckpointShape, config: LoraConfig | None = None) -> None:
    """Raise `ConfigError` for a model that this engine has no adapters for, or not the adapter of `config`."""
    kind = "experts" if model.experts else "multi-latent attention" if model.latent else ""
    if kind:
        raise ConfigError(
            f"the model has {kind}, beside which the megatron engine has no adapters.",
            part="megatron engine",
            hint="Use trainer.engine=fsdp2 for it, or train the weights themselves.",
        )
    if config is not None:
        layers = _linear_layers(model).items()
        chosen_sites([LoraSite(name, *shape, (0, shape[0]), (0, shape[1])) for name, shape in layers], config)


class MegatronAdapted:
    """megatron-core's layers on this rank, for `Adapters`. With `sequence_parallel`, activations between them are split."""

    def __init__(self, chunks: Sequence[Any], model: CheckpointShape, *, sequence_parallel: bool) -> None:
        self._chunks = [unwrapped(chunk) for chunk in chunks]
        self._model, self._sequence_parallel = model, sequence_parallel
        self.weights = {f"{name}.weight": (name, 0) for name in _linear_layers(model)}
        self.groups = LoraGroups(
            parallel_state.get_data_parallel_group(),
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_model_parallel_group(),
            parallel_state.get_tensor_model_parallel_rank() == 0,
        )

    def install(self, pair_of: PairOf) -> tuple[list[LoraSite], dict[str, tuple[int, int]]]:
        """See `AdaptedModel.install`."""
        check_lora(self._model)
        layers = [
            fused for chunk in self._chunks for layer in chunk.decoder.layers for fused in self._fused_layers(layer)
        ]
        for fused in layers:
            fused.linear.register_forward_hook(_beside(fused, pair_of))
        for chunk in self._chunks:
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_ask_for_gradient)
        return [site for fused in layers for site in fused.sites], _linear_layers(self._model)

    def _fused_layers(self, layer: Any) -> Iterator[_Fused]:
        """Yield the linear layers of one decoder layer."""
        model, prefix = self._model, f"model.layers.{layer.layer_number - 1}"
        size = parallel_state.get_tensor_model_parallel_world_size()
        queries_keys_values = (model.queries, model.head_dim, model.head_dim)
        half = model.intermediate // size
        attention, feed_forward = layer.self_attention, layer.mlp
        for linear, names, group_rows in (
            (attention.linear_qkv, ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), queries_keys_values),
            (attention.linear_proj, ("self_attn.o_proj",), (model.hidden,)),
            (feed_forward.linear_fc1, ("mlp.gate_proj", "mlp.up_proj"), (half, half)),
            (feed_forward.linear_fc2, ("mlp.down_proj",), (model.hidden,)),
        ):
            by_rows = not isinstance(linear, RowParallelLinear)
            sites = tuple(self._site(f"{prefix}.{name}", by_rows=by_rows) for name in names)
            yield _Fused(linear, sites, group_rows, by_rows, self._sequence_parallel)

    def _site(self, module: str, *, by_rows: bool) -> LoraSite:
        rank = parallel_state.get_tensor_model_parallel_rank()
        rows, columns = checkpoint_shapes(self._model)[f"{module}.weight"]
        split = (rows if by_rows else columns) // parallel_state.get_tensor_model_parallel_world_size()
        part = (rank * split, split)
        held_rows, held_columns = (part, (0, columns)) if by_rows else ((0, rows), part)
        # Each rank of sequence parallelism has the gradient of its own positions only.
        partial = frozenset("A" if by_rows else "B") if self._sequence_parallel else frozenset[str]()
        return LoraSite(module, rows, columns, held_rows, held_columns, partial)


@contextmanager
def frozen(chunks: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Compute no gradients of the model's own weights inside the block."""
    parameters = [each for chunk in chunks for each in chunk.parameters() if each.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)


def _linear_layers(model: CheckpointShape) -> dict[str, tuple[int, int]]:
    """Return rows and columns of the linear layers in all decoder layers of the model, by name, in the checkpoint's order."""
    inner = re.compile(r"model\.layers\.\d+\.\w+\.\w+_proj\.weight")
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
    add = _by_rows if fused.by_rows else _by_columns

    def hook(module: Any, arguments: Any, output: Any) -> Any:
        del module
        pairs = [pair_of(site.module) for site in fused.sites]
        if not any(pairs):
            return output
        tokens = arguments[0].flatten(0, -2)  # [tokens, 1, columns], whose runs may be of several adapters
        return output[0] + add(fused, pairs, tokens).view_as(output[0]), output[1]

    return hook


def _by_rows(fused: _Fused, pairs: Sequence[LayerPair | None], given: torch.Tensor) -> torch.Tensor:
    """Compute the adapters' output for a column parallel layer: [..., this rank's rows], from [..., columns].

    With sequence parallelism, the input is this rank's part of the sequence.
    """
    low = torch.cat([pair.lowered(given) for pair in pairs if pair is not None], dim=-1)
    if fused.sequence_parallel:
        low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
    else:
        low = copy_to_tensor_model_parallel_region(low)
    lows = iter(low.split([pair.width for pair in pairs if pair is not None], dim=-1))
    groups = fused.sites[0].held_rows[1] // fused.group_rows[0]
    parts = []
    for pair, rows in zip(pairs, fused.group_rows, strict=True):
        if pair is None:
            parts.append(low.new_zeros(*low.shape[:-1], groups, rows))
        else:
            parts.append(pair.raised(next(lows)).view(*low.shape[:-1], groups, rows))
    return torch.cat(parts, dim=-1).flatten(-2)


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
