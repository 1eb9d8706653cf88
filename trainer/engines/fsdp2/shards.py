"""One rank's shards of a Hugging Face model under FSDP2, in the form that `weightlane.sync` publishes.

Works on any model after ``fully_shard``, in the loop of this package or in a script of your own. It also works on a model that
is not sharded; rank 0 then publishes everything.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.torchrun.module_slices import held_slice, live_tensors
from weightlane.sync.version.box import Box, boxes_of_run
from weightlane.sync.version.tensor_spec import LiveTensor, LocalShard, TensorSpec, kept_in_float32

from ..hf.checkpoint import CheckpointRun, checkpoint_runs, checkpoint_tensors, plain_name
from ..hf.model_dir import has_weights, kept_types
from ..hf.stored_slices import TrainedSlice
from ..optimizers.settings import STEP

_PART = "fsdp2 shards"


def shards_of(
    model: torch.nn.Module, dtype: torch.dtype | None = None, *, checkpoint: str | Path | None = None
) -> list[LocalShard]:
    """List this rank's shards of the checkpoint tensors of `model`, under their names on disk.

    The shards are views of the live parameters, so optimizer steps change their values. Call it once, after
    ``fully_shard`` and after moving the model to its device. If a parameter is moved to other memory later,
    publishing raises `ManifestError`.

    Args:
        model: A transformers model whose parameters are plain tensors, or ``DTensor``s with any sharding or replication.
            Wrappers of ``torch.compile``, ``DistributedDataParallel`` and activation checkpointing are unwrapped.
        dtype: Dtype of floating-point tensors on the wire: the one the rollout computes in, or that of its checkpoint on
            disk. Tensors that are float32 in a checkpoint of a mostly narrower dtype stay float32. None sends each tensor in its
            own dtype.
        checkpoint: Directory of the checkpoint whose dtypes decide that; by default the one that transformers loaded the model
            from. If that is gone, the dtypes in memory decide.

    Raises:
        ConfigError: A parameter is a partial sum; a checkpoint tensor is not a contiguous part of one parameter; or the model has
            wrappers that keep parameters in another form: FSDP1, or PEFT's adapters.
    """
    model = _unwrapped(model)
    tensors = checkpoint_tensors(model)
    rank = dist.get_rank() if dist.is_initialized() else 0
    runs = checkpoint_runs(model, tensors)
    kept = kept_in_float32({run.name: tensors[run.source].dtype for run in runs})
    if directory := _checkpoint_of(model, checkpoint):
        kept = kept_types(directory, [run.name for run in runs])
    return local_shards(runs, tensors, rank, dtype, kept, live=live_tensors(model, tensors, plain_name))


def local_shards(
    runs: Sequence[CheckpointRun],
    tensors: Mapping[str, torch.Tensor],
    rank: int,
    dtype: torch.dtype | None,
    kept: Collection[str],
    *,
    live: Mapping[str, tuple[LiveTensor, ...]] = MappingProxyType({}),
    values: Mapping[str, torch.Tensor] = MappingProxyType({}),
) -> list[LocalShard]:
    """List the shards of `runs` that rank `rank` holds in `tensors`; plain tensors count as rank 0's. See `shards_of`.

    Tensors named in `kept` are sent in their own dtype. The data of those in `values` are there, of the shape that is held.
    """
    local = {name: held_slice(name, tensor, _PART) for name, tensor in tensors.items()}
    local |= {name: (local[name][0], data) for name, data in values.items()}
    shards = []
    for run in runs:
        source = tensors[run.source]
        on_wire = source.dtype
        if dtype is not None and source.is_floating_point() and run.name not in kept:
            on_wire = dtype
        if rank == 0 or isinstance(source, DTensor):
            spec = TensorSpec(run.name, run.shape, on_wire)
            found = _overlap(run, spec, tuple(source.shape), *local[run.source])
            shards += [replace(shard, live=live.get(run.source, ())) for shard in found]
    return shards


def trained_slices(
    runs: Sequence[CheckpointRun],
    tensors: Mapping[str, torch.Tensor],
    optimizer: Mapping[str, Mapping[str, torch.Tensor]],
) -> list[TrainedSlice]:
    """List the slices of `runs` that are on this rank, each with its weight and moments; replicas are on several ranks.

    `optimizer` has this rank's part of the state of each parameter, by in-memory name: moments by the optimizer's names for them,
    and the number of steps as `STEP`, if it counts them.
    """
    moments: dict[str, dict[str, torch.Tensor]] = {run.name: {} for run in runs}
    for key in {key for state in optimizer.values() for key in state} - {STEP}:
        values = {source: state[key] for source, state in optimizer.items() if key in state}
        trained = [run for run in runs if run.source in values]
        for shard in local_shards(trained, tensors, rank=0, dtype=None, kept=(), values=values):
            moments[shard.spec.name][key] = shard.data
    for run in runs:
        if STEP in optimizer.get(run.source, {}):
            moments[run.name][STEP] = optimizer[run.source][STEP]
    return [
        TrainedSlice(shard.spec.name, shard.box, shard.data, moments[shard.spec.name])
        for shard in local_shards(runs, tensors, rank=0, dtype=None, kept=())
        if shard.numel
    ]


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside wrappers that leave its parameters as they are. Raises `ConfigError` for other wrappers."""
    while isinstance(model, OptimizedModule | DistributedDataParallel):
        model = model._orig_mod if isinstance(model, OptimizedModule) else model.module
    names = [name for name, _ in model.named_parameters()]
    if any("_fsdp_wrapped_module" in name or name.endswith("_flat_param") for name in names):
        raise ConfigError(
            "the model is wrapped by FullyShardedDataParallel (FSDP1), which keeps flat pieces of parameters.",
            part=_PART,
            hint="Use torch.distributed.fsdp.fully_shard (FSDP2), whose parameters keep their names and shapes.",
        )
    if adapted := next((name for name in names if ".base_layer." in name or ".lora_" in name), None):
        raise ConfigError(
            f"the model has adapters of PEFT that are not merged: {adapted}.",
            part=_PART,
            hint="Publish what model.merge_and_unload() returns, or train adapters with trainer.lora.",
        )
    return model


def _checkpoint_of(model: torch.nn.Module, given: str | Path | None) -> Path | None:
    """Return the directory of the model's checkpoint files, or None if it is unknown or gone.

    Raises `ConfigError` if the directory was `given` and holds no weights.
    """
    name = str(given or getattr(model, "name_or_path", ""))
    path = Path(name)
    if name and not path.is_dir():
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - comes with transformers, which the model is of

        try:
            path = Path(snapshot_download(name, local_files_only=True))
        except (OSError, ValueError):
            path = Path()
    if name and has_weights(path):
        return path
    if given is not None:
        raise ConfigError(f"there are no weights in {given}.", part=_PART, hint="Name a Hugging Face directory.")
    return None


def _overlap(
    run: CheckpointRun, spec: TensorSpec, whole: tuple[int, ...], held: Box, data: torch.Tensor
) -> list[LocalShard]:
    """Return the part of `run` inside `data`, the slice `held` of a source of shape `whole`; an empty shard if there is none."""
    (box,) = boxes_of_run(whole, run.offset, spec.numel) if spec.numel else (Box.whole(whole),)
    common = box.intersect(held)
    if common is None and spec.shape:
        return [LocalShard.nothing(spec, data)]
    if common is None:
        return [] if box.shape else [LocalShard(spec, (), data)]
    # The run of one expert in a fused tensor has a leading dimension of length one.
    fused = len(whole) - len(spec.shape)
    return [
        LocalShard(spec, common.within(box).starts[fused:], data[common.within(held).index].view(common.shape[fused:]))
    ]
