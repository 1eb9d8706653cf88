"""The tensors that are published of a model with adapters: its weights with an adapter added, or the adapter itself."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.box import Box
from weightlane.sync.version.tensor_spec import LocalShard, TensorSpec

from ...config import LoraConfig
from .adapter import Adapter, LoraPair
from .peft_files import peft_name
from .sites import MATRICES, PART


@torch.no_grad()
def merge_slice(pair: LoraPair, box: Box, base: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Compute ``W + scale * B A`` [rows, columns] in float32 for `base`, the rectangle `box` of a layer's weight in any dtype.

    `out` may be of half precision: what is computed is then rounded once.
    """
    first_row, first_column = pair.site.held_rows[0], pair.site.held_columns[0]
    rows = slice(box.starts[0] - first_row, box.stops[0] - first_row)
    columns = slice(box.starts[1] - first_column, box.stops[1] - first_column)
    return torch.add(base, pair.up[rows] @ pair.down[:, columns], alpha=pair.scale, out=out)


def adapter_names(layers: Mapping[str, tuple[int, int]], config: LoraConfig) -> list[str]:
    """List the names of all tensors of an adapter on all ranks, in the order of `layers`."""
    return [peft_name(module, matrix) for module in layers if is_target(module, config) for matrix in MATRICES]


def adapter_shards(
    adapter: Adapter, layers: Mapping[str, tuple[int, int]], wire_dtype: torch.dtype
) -> list[LocalShard]:
    """List this rank's shards of an adapter: views of its parameters, and empty shards for layers on other ranks.

    `layers` has the numbers of outputs and inputs of each layer, on any rank, that can have an adapter.
    """
    rank, device = adapter.config.rank, adapter.parameters[0].device if adapter.parameters else torch.device("cpu")
    nothing = torch.empty(0, device=device)
    shards = []
    for module, (rows, columns) in layers.items():
        if not is_target(module, adapter.config):
            continue
        pair = adapter.pairs.get(module)
        for matrix, shape in zip(MATRICES, ((rank, columns), (rows, rank)), strict=True):
            spec = TensorSpec(peft_name(module, matrix), shape, wire_dtype)
            if pair is None:
                shards.append(LocalShard.nothing(spec, nothing))
            else:
                starts = pair.site.box(matrix, rank).starts
                shards.append(LocalShard(spec, starts, pair.matrices[matrix].detach()))
    return shards


def check_carries(published: LoraConfig, wanted: LoraConfig, layers: Mapping[str, tuple[int, int]], name: str) -> None:
    """Raise `ConfigError`, on every rank alike, unless `copy_padded` can copy adapter `name`, of configuration `wanted`."""
    if wanted.rank > published.rank:
        raise ConfigError(
            f"adapter {name!r} has rank {wanted.rank}, and what is published rank {published.rank}.",
            part=PART,
            hint="Set trainer.lora.rank to the highest rank of all adapters.",
        )
    lacking = {each.rpartition(".")[2] for each in layers if is_target(each, wanted) and not is_target(each, published)}
    if lacking:
        raise ConfigError(
            f"adapter {name!r} is beside {', '.join(sorted(lacking))}, which what is published is not.",
            part=PART,
            hint="Add them to trainer.lora.targets, or leave trainer.lora.targets out.",
        )


@torch.no_grad()
def copy_padded(source: Adapter, target: Adapter) -> None:
    """Copy A and B of `source` into the larger `target`, on this rank: A's further rows and B's further columns become zeros.

    Layers of `target` that `source` does not have become zeros.
    """
    for module, pair in target.pairs.items():
        theirs = source.pairs.get(module)
        for matrix, mine in pair.matrices.items():
            mine.zero_()
            if theirs is not None:
                values = theirs.matrices[matrix]
                mine[: values.shape[0], : values.shape[1]] = values


def is_target(module: str, config: LoraConfig) -> bool:
    """Whether an adapter of `config` is beside the layer `module`, if that can have one."""
    return not config.targets or module.rpartition(".")[2] in config.targets
