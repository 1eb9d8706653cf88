"""Adapters of a transformers model under FSDP2, with or without tensor parallelism: beside linear layers, and of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from ...config import LoraConfig
from ..hf.checkpoint import CheckpointRun
from ..lora.adapter import LoraGroups
from ..lora.adapters import PairOf
from ..lora.sites import LoraSite, chosen_sites
from ..rank_collectives import copied, summed
from .expert_lora import stacked_experts
from .mesh import RankMesh


class Fsdp2Adapted:
    """The linear layers and experts in the decoder layers of a model that `RankMesh` sharded, for `Adapters`."""

    def __init__(
        self,
        model: torch.nn.Module,
        layers: Sequence[torch.nn.Module],
        mesh: RankMesh,
        runs: Sequence[CheckpointRun],
    ) -> None:
        self._linears = _linears(model, layers)
        self._experts = stacked_experts(model, layers, runs)
        of_experts = {site.module for each in self._experts for site in each.sites}
        self.weights: dict[str, tuple[str, int]] = {}
        for run in runs:
            module = run.source.removesuffix(".weight")
            if module in self._linears and run.source == f"{module}.weight":
                self.weights[run.name] = module, run.offset // self._linears[module].in_features
            elif (module := run.name.removesuffix(".weight")) in of_experts:
                self.weights[run.name] = module, 0
        tensor = None if mesh.tensor is None else mesh.tensor.get_group()
        self.groups = LoraGroups(mesh.data.get_group(), tensor, tensor, mesh.first_of_tensor)

    def install(self, pair_of: PairOf) -> tuple[list[LoraSite], dict[str, tuple[int, int]]]:
        """See `AdaptedModel.install`."""
        sites = [_site(name, module) for name, module in self._linears.items()]
        for site in sites:
            beside, linear = _Beside(site, self.groups.tensor, pair_of), self._linears[site.module]
            # The hooks run before tensor parallelism turns the input into a DTensor, and after it turned the output into a plain
            # tensor.
            linear.register_forward_pre_hook(beside.keep_input, prepend=True)
            linear.register_forward_hook(beside.add_output)
        for experts in self._experts:
            experts.install(pair_of)
            sites += experts.sites
        return sites, {site.module: (site.rows, site.columns) for site in sites}


def check_adapter(
    model: torch.nn.Module, layers: Sequence[torch.nn.Module], runs: Sequence[CheckpointRun], config: LoraConfig
) -> None:
    """Raise the `ConfigError` that an adapter for `model` would raise; parameters may be on the meta device."""
    sites = [_site(name, module) for name, module in _linears(model, layers).items()]
    chosen_sites([*sites, *(site for each in stacked_experts(model, layers, runs) for site in each.sites)], config)


def _linears(model: torch.nn.Module, layers: Sequence[torch.nn.Module]) -> dict[str, torch.nn.Linear]:
    """Return the linear layers inside the decoder layers `layers` of `model`, by name."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and id(module) in inside
    }


class _Beside:
    """Hooks of one linear layer, which add the output of its adapter."""

    def __init__(self, site: LoraSite, group: dist.ProcessGroup | None, pair_of: PairOf) -> None:
        self._module, self._group, self._pair_of = site.module, group, pair_of
        self._by_rows, self._by_columns = site.splits("B"), site.splits("A")
        self._input: torch.Tensor | None = None

    def keep_input(self, module: torch.nn.Module, arguments: tuple[Any, ...]) -> None:
        del module
        self._input = arguments[0] if self._pair_of(self._module) is not None else None

    def add_output(self, module: torch.nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        del module, arguments
        pair, given = self._pair_of(self._module), self._input
        self._input = None
        if pair is None or given is None:
            return output
        if self._group is None or not (self._by_rows or self._by_columns):
            return output + pair.added(given)
        low = pair.lowered(given)
        return output + pair.raised(copied(low, self._group) if self._by_rows else summed(low, self._group))


def _site(name: str, module: torch.nn.Linear) -> LoraSite:
    rows, columns = module.out_features, module.in_features
    held = [(0, rows), (0, columns)]
    weight = module.weight
    if isinstance(weight, DTensor):
        mesh = weight.device_mesh
        for dimension, (label, placement) in enumerate(zip(mesh.mesh_dim_names or (), weight.placements, strict=True)):
            if label == "tp" and isinstance(placement, Shard):
                size = (rows, columns)[placement.dim] // mesh.size(dimension)
                held[placement.dim] = (mesh.get_local_rank(dimension) * size, size)
    return LoraSite(name, rows, columns, held[0], held[1])
