"""What one rank holds of a Hugging Face model that FSDP2 has sharded, in the form that `weightlane.sync` publishes.

Works on any model after ``fully_shard``, in the loop of this package or in a script of your own, and as well on a model that
was not sharded at all, of which rank 0 then publishes everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.tensor_spec import LocalShard, TensorSpec

from .hf_names import CheckpointRun, checkpoint_runs


def shards_of(model: torch.nn.Module, dtype: torch.dtype | None = None) -> list[LocalShard]:
    """Every checkpoint tensor of `model` that this rank holds something of, by its name on disk.

    The shards are views of the live parameters, so optimizer steps change what they hold. Call it once, after
    ``fully_shard`` and after moving the model to its device.

    Args:
        model: A transformers model whose parameters are whole or ``Shard(0)`` ``DTensor``s.
        dtype: In which type floating-point tensors travel: the one the rollout computes in, or that of its checkpoint on
            disk. None sends each as it is.

    Raises:
        ConfigError: A parameter is placed otherwise, or is saved as something other than parts of one parameter.
    """
    tensors = checkpoint_tensors(model)
    rank = dist.get_rank() if dist.is_initialized() else 0
    return local_shards(checkpoint_runs(model, tensors), tensors, rank, dtype)


def local_shards(
    runs: Sequence[CheckpointRun], tensors: Mapping[str, torch.Tensor], rank: int, dtype: torch.dtype | None
) -> list[LocalShard]:
    """The parts of `runs` that rank `rank` holds of `tensors`; whole tensors count as rank 0's. See `shards_of`."""
    local = {name: _local_run(name, tensor) for name, tensor in tensors.items()}
    shards = []
    for run in runs:
        source = tensors[run.source]
        on_wire = source.dtype if dtype is None or not source.is_floating_point() else dtype
        if rank == 0 or isinstance(source, DTensor):
            shards.append(_overlap(run, TensorSpec(run.name, run.shape, on_wire), *local[run.source]))
    return shards


def checkpoint_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by in-memory name; tied ones once, under the first name."""
    saved = model.state_dict(keep_vars=True).keys()
    named = dict(model.named_parameters())
    return {**named, **{name: buffer for name, buffer in model.named_buffers() if name in saved}}


def _local_run(name: str, tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
    """First element and flat live data of the part of `tensor` that this rank holds."""
    if not isinstance(tensor, DTensor):
        return 0, tensor.detach().view(-1)
    if len(tensor.placements) != 1 or tensor.placements[0] != Shard(0):
        raise ConfigError(
            f"parameter {name} is placed as {tensor.placements}; only Shard(0) on a one-dimensional mesh is a flat run.",
            part="fsdp2 shards",
            hint="Shard with fully_shard over one mesh dimension.",
        )
    _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    row = math.prod(tensor.shape[1:])
    return min(offsets[0] * row, tensor.numel()), tensor.to_local().detach().view(-1)


def _overlap(run: CheckpointRun, spec: TensorSpec, start: int, data: torch.Tensor) -> LocalShard:
    """The part of `run` within the local elements ``start .. start + len(data)`` of its source; empty when there is none."""
    low = min(max(run.offset, start), run.offset + spec.numel)
    high = max(min(run.offset + spec.numel, start + data.numel()), low)
    if low == high:
        return LocalShard(spec, 0, data[:0])
    return LocalShard(spec, low - run.offset, data[low - start : high - start])
