"""Adapters of megatron-core's parallel linear layers, under the names of the Hugging Face layers that these fuse or split.

Each Hugging Face layer has its own A and B: ``linear_qkv`` has three pairs, and ``linear_fc1`` two. The outputs of the B's are
arranged like the rows of the fused matrix (see `checkpoint`). Ranks exchange only tensors of the adapter's rank. Each expert's
layers have their own, too, on the rank of expert parallelism that has the expert; all tokens of the expert are there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
from .layers import GroupedLinear
from .model_facts import CheckpointShape
from .parameter_map import CheckpointSlice, Coordinates
from .weights import parameter_pieces, unwrapped

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class _Fused:
    """A linear layer of megatron-core, and the checkpoint's layers that it fuses."""

    linear: Any
    sites: tuple[LoraSite, ...]
    """In the order of their first rows. In grouped experts, those of one expert come after those of the other."""
    order: torch.Tensor | None
    """int64 [rows]: where each row is among those of `sites`, one site after the other; None where that is their order."""
    sequence_parallel: bool

    @property
    def splits_columns(self) -> bool:
        """Whether tensor parallelism cuts it by columns."""
        return self.sites[0].splits("A")

    @property
    def splits_rows(self) -> bool:
        """Whether tensor parallelism cuts it by rows. An uncut layer is on every rank, or is an expert's."""
        return len(self.linear.weight) < sum(site.rows for site in self.sites)


def check_lora(model: CheckpointShape, shapes: Shapes, config: LoraConfig) -> None:
    """Raise `ConfigError` for an adapter with a target that the model, of which a checkpoint has `shapes`, does not have."""
    _refuse_linear_attention(model)
    layers = _linear_layers(shapes).items()
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

    def __init__(
        self, chunks: Sequence[Any], model: CheckpointShape, shapes: Shapes, at: Coordinates, layout: MegatronConfig
    ) -> None:
        self._chunks, self._model, self._at = chunks, model, at
        self._sequence_parallel, self._linears = layout.sequence_parallel, _linear_layers(shapes)
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
        pieces, sites = parameter_pieces(self._chunks, self._model, self._at), list[LoraSite]()
        for chunk in map(unwrapped, self._chunks):
            for module in chunk.decoder.layers.modules():
                weight = module._parameters.get("weight")
                held = [] if weight is None else pieces[weight]
                if held and all(piece.name in self.weights for piece in held):
                    fused = self._fused(module, held)
                    module.register_forward_hook(_beside(fused, pair_of))
                    sites += fused.sites
            if chunk.pre_process:
                chunk.embedding.register_forward_hook(_ask_for_gradient)
        return sites, self._linears

    def _fused(self, linear: Any, pieces: Sequence[CheckpointSlice]) -> _Fused:
        """Describe a layer whose matrix is `pieces`, in the order of its rows."""
        by_layer: dict[str, list[CheckpointSlice]] = {}
        for piece in pieces:
            by_layer.setdefault(piece.name.removesuffix(".weight"), []).append(piece)
        sites = tuple(self._site(module, held) for module, held in by_layer.items())
        first, before = dict[str, int](), 0
        for site in sites:
            first[f"{site.module}.weight"] = before - site.held_rows[0]
            before += site.held_rows[1]
        starts = [first[piece.name] + piece.starts[0] for piece in pieces]
        counts = [piece.box.shape[0] for piece in pieces]
        order = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, counts, strict=True)])
        in_order = torch.equal(order, torch.arange(before))
        place = None if in_order else order.to(linear.weight.device)
        return _Fused(linear, sites, place, self._sequence_parallel)

    def _site(self, module: str, held: Sequence[CheckpointSlice]) -> LoraSite:
        """Describe an adapter's part on this rank, which has the rectangles `held` of the layer's weight."""
        rows, columns = self._linears[module]
        first, count = min(piece.starts[0] for piece in held), sum(piece.box.shape[0] for piece in held)
        is_run = max(piece.starts[0] + piece.box.shape[0] for piece in held) == first + count
        # B is whole where the rank computes with rows in several places: those of the gate and of up in one layer.
        held_rows = (first, count) if is_run else (0, rows)
        held_columns = held[0].starts[1], held[0].box.shape[1]
        partial, expert = "" if is_run else "B", ".experts." in module
        if self._sequence_parallel and not expert:
            # Each rank has the gradient of its own positions only: of the inputs, of the outputs, or of both.
            by_rows, by_columns = count < rows, held_columns[1] < columns
            partial += "A" if by_rows else "B" if by_columns else "AB"
        return LoraSite(module, rows, columns, held_rows, held_columns, frozenset(partial), expert)


def _linear_layers(shapes: Shapes) -> dict[str, tuple[int, int]]:
    """Return rows and columns of the linear layers in all decoder layers of the model, by name, in the checkpoint's order.

    The router is none of them, as in transformers.
    """
    inner = re.compile(r"model\.layers\.\d+\..+_(proj|mqa)\.weight")
    found = {name.removesuffix(".weight"): shape for name, shape in shapes.items() if inner.fullmatch(name)}
    return {name: (shape[0], shape[1]) for name, shape in found.items()}


def _ask_for_gradient(module: Any, arguments: Any, output: torch.Tensor) -> None:
    """Make the output of a frozen embedding require a gradient.

    megatron-core's recomputation computes no gradients inside a layer whose input requires none.
    """
    del module, arguments
    if torch.is_grad_enabled() and not output.requires_grad:
        output.requires_grad_()


def _beside(fused: _Fused, pair_of: PairOf) -> Callable[[Any, Any, Any], Any]:
    """Return the hook that adds the adapters' output to that of a linear layer, which is a tensor and a bias."""
    add = _by_columns if fused.splits_columns else _by_rows
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
    if fused.splits_rows and fused.sequence_parallel:
        low = gather_from_sequence_parallel_region(low, tensor_parallel_output_grad=True)
    elif fused.splits_rows:
        low = copy_to_tensor_model_parallel_region(low)
    lows = iter(torch.split(low, [pair.width for pair in pairs if pair is not None], dim=-1))
    parts = [
        low.new_zeros(*low.shape[:-1], site.held_rows[1]) if pair is None else pair.raised(next(lows))
        for site, pair in zip(fused.sites, pairs, strict=False)  # of grouped experts, `pairs` are those of one
    ]
    joined = torch.cat(parts, dim=-1)
    return joined if fused.order is None else joined.index_select(-1, fused.order)


def _by_experts(fused: _Fused, pairs: Sequence[LayerPair | None], given: torch.Tensor) -> torch.Tensor:
    """Compute the adapters' output for grouped experts: [tokens, rows], from [tokens, columns], sorted by expert."""
    assert isinstance(fused.linear, GroupedLinear)
    counts = fused.linear.counts.tolist()
    layers = len(pairs) // len(counts)
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
