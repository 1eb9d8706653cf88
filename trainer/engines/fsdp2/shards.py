"""The shards that one rank holds of a Hugging Face model under FSDP2, in the form that `weightlane.sync` publishes.

Works on any model after ``fully_shard``, in the loop of this package or in a script of your own, and as well on a model that
was not sharded at all, of which rank 0 then publishes everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.box import Box, boxes_of_run
from weightlane.sync.version.tensor_spec import LocalShard, TensorSpec, kept_in_float32

from ..hf.names import CheckpointRun, checkpoint_runs


def shards_of(model: torch.nn.Module, dtype: torch.dtype | None = None) -> list[LocalShard]:
    """Every checkpoint tensor of `model` that this rank holds something of, by its name on disk.

    The shards are views of the live parameters, so optimizer steps change what they hold. Call it once, after
    ``fully_shard`` and after moving the model to its device.

    Args:
        model: A transformers model whose parameters are whole, or ``DTensor``s that are sharded or replicated in any way.
        dtype: In which type floating-point tensors travel: the one the rollout computes in, or that of its checkpoint on
            disk. Those that transformers keeps in float32 in a narrower model stay that. None sends each as it is.

    Raises:
        ConfigError: A parameter is a partial sum, or is saved as something other than parts of one parameter.
    """
    tensors = checkpoint_tensors(model)
    rank = dist.get_rank() if dist.is_initialized() else 0
    runs = checkpoint_runs(model, tensors)
    kept = kept_in_float32({run.name: tensors[run.source].dtype for run in runs})
    return local_shards(runs, tensors, rank, dtype, kept)


def local_shards(
    runs: Sequence[CheckpointRun],
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    dtype: torch.dtype | None,
    kept: Collection[str],
) -> list[LocalShard]:
    """The parts of `runs` that rank `rank` holds of `tensors`; whole tensors count as rank 0's. See `shards_of`.

    What is `kept` travels in the type that it has.
    """
    local = {name: local_slice(name, tensor) for name, tensor in tensors.items()}
    shards = []
    for run in runs:
        source = tensors[run.source]
        on_wire = source.dtype
        if dtype is not None and source.is_floating_point() and run.name not in kept:
            on_wire = dtype
        if rank == 0 or isinstance(source, DTensor):
            shards += _overlap(run, TensorSpec(run.name, run.shape, on_wire), tuple(source.shape), *local[run.source])
    return shards


def checkpoint_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and persistent buffers by in-memory name; tied ones once, under the first name."""
    saved = model.state_dict(keep_vars=True).keys()
    named = dict(model.named_parameters())
    return {**named, **{name: buffer for name, buffer in model.named_buffers() if name in saved}}


def local_slice(name: str, tensor: torch.Tensor) -> tuple[Box, torch.Tensor]:
    """Which slice of `tensor` this rank holds, and its live data."""
    if not isinstance(tensor, DTensor):
        return Box.whole(tuple(tensor.shape)), tensor.detach()
    if odd := [each for each in tensor.placements if not isinstance(each, Shard | Replicate | _StridedShard)]:
        raise ConfigError(
            f"parameter {name} is placed as {odd[0]}, of which no rank has the values.",
            part="fsdp2 shards",
            hint="Parameters are sharded or replicated; reduce partial sums first.",
        )
    shape, starts = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return Box(tuple(starts), tuple(shape)), tensor.to_local().detach()


def _overlap(
    run: CheckpointRun, spec: TensorSpec, whole: tuple[int, ...], held: Box, data: torch.Tensor
) -> list[LocalShard]:
    """The part of `run` inside `data`, the slice `held` of a source of shape `whole`; an empty shard if there is none."""
    (box,) = boxes_of_run(whole, run.offset, spec.numel) if spec.numel else (Box.whole(whole),)
    common = box.intersect(held)
    if common is None and spec.shape:
        return [LocalShard.nothing(spec, data)]
    if common is None:
        return [] if box.shape else [LocalShard(spec, (), data)]
    # The run of one expert out of a fused tensor has a dimension of length one in front.
    fused = len(whole) - len(spec.shape)
    return [
        LocalShard(spec, common.within(box).starts[fused:], data[common.within(held).index].view(common.shape[fused:]))
    ]
