"""This rank's slices of a torch module's parameters and buffers: plain tensors, or ``DTensor``s with any sharding."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from weightlane.ckpt_engines import ConfigError

from ..version.box import Box
from ..version.tensor_spec import LiveTensor


def held_slice(name: str, tensor: torch.Tensor, part: str) -> tuple[Box, torch.Tensor]:
    """Return the slice of `tensor` that this rank holds, as a box, and its live data.

    Raises `ConfigError`, from `part`, if the tensor is a partial sum.
    """
    if not isinstance(tensor, DTensor):
        return Box.whole(tuple(tensor.shape)), tensor.detach()
    if odd := [each for each in tensor.placements if not isinstance(each, Shard | Replicate | _StridedShard)]:
        raise ConfigError(
            f"parameter {name} is placed as {odd[0]}, of which no rank has the values.",
            part=part,
            hint="Parameters are sharded or replicated; reduce partial sums first.",
        )
    shape, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(starts), tuple(shape)), _local(tensor)


def live_tensors(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], shown: Callable[[str], str] = str
) -> dict[str, tuple[LiveTensor, ...]]:
    """Return the references of `module` and its submodules to each of `tensors`; a tied tensor has several.

    `shown` turns the full name of a parameter or buffer into the one for errors.
    """
    sources = {id(tensor): name for name, tensor in tensors.items()}
    found: dict[str, tuple[LiveTensor, ...]] = defaultdict(tuple)
    for path, holder in module.named_modules():
        names = path.split(".") if path else []
        for leaf, tensor in (*holder._parameters.items(), *holder._buffers.items()):
            if tensor is not None and (source := sources.get(id(tensor))) is not None:
                name = shown(f"{path}.{leaf}" if path else leaf)
                found[source] += (LiveTensor(name, _local(tensor), partial(_now, module, names, leaf, tensor)),)
    return found


def _now(module: torch.nn.Module, path: Sequence[str], leaf: str, before: torch.Tensor) -> torch.Tensor | None:
    for name in path:  # `get_submodule` takes some 20 microseconds, for each tensor, on the training thread
        child = module._modules.get(name)
        if child is None:
            child = getattr(module, name, None)  # a wrapper shows the modules of what it wraps
        if not isinstance(child, torch.nn.Module):
            return None
        module = child
    current: torch.Tensor | None = getattr(module, leaf, None)
    if current is None:
        return None
    if isinstance(before, DTensor) and not isinstance(current, DTensor):
        current = before  # FSDP has the gathered parameter there for now, and will put this one back
    return _local(current)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()
