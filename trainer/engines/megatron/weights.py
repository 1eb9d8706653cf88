"""The float32 weights that megatron-core's optimizers change, as slices of Hugging Face checkpoint tensors.

megatron-core keeps them in one of three places: in the model's own parameters (float32 compute), in separate copies of these
(bfloat16 compute), or, with the distributed optimizer, in flat runs of either that are divided among the data parallel ranks.
AdamW's moments are laid out like the weights. In all three cases every slice here is a view: nothing is copied or sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.transformer.transformer_config import TransformerConfig

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.box import boxes_of_run
from weightlane.sync.version.tensor_spec import LocalShard, TensorSpec

from ...config import TrainerConfig
from ..hf.model_dir import half_precision
from ..hf.stored_slices import TrainedSlice
from ..optimizers.adamw import AdamW
from ..optimizers.settings import MOMENTS, STEP, Moments
from .model_facts import CheckpointShape
from .parameter_map import CheckpointSlice, Coordinates, pieces_of

_UNTRAINED = ".router.expert_bias"
"""End of the name of the only buffer that is part of a checkpoint."""


class FrozenWeights:
    """Replaces the optimizer of a model whose own weights are not trained: holds only master weights.

    They have the dtypes in `stored`, by checkpoint tensor, where these are of half precision, else float32.
    """

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        model: CheckpointShape,
        at: Coordinates,
        stored: Mapping[str, torch.dtype],
    ) -> None:
        pieces = parameter_pieces(chunks, model, at)
        self.masters = []
        """Pairs of a parameter and its master, which is the parameter itself if its dtype has the checkpoint's values."""
        for parameter in (each for chunk in chunks for each in chunk.parameters()):
            exact = half_precision(stored.get(piece.name) for piece in pieces[parameter])
            self.masters.append((parameter, parameter.detach().to(torch.promote_types(exact, parameter.dtype))))

    def zero_grad(self) -> None:
        """Do nothing: there are no gradients."""


@dataclass(frozen=True, slots=True)
class _Master:
    """The float32 tensor that an optimizer steps: a full parameter of the model, or a flat run of one."""

    parameter: torch.nn.Parameter
    start: int
    """First element of the row-major flattened parameter."""
    weight: torch.Tensor


def unwrapped(chunk: Any) -> Any:
    """Return the ``GPTModel`` inside megatron-core's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def weight_slices(
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | FrozenWeights,
    model: CheckpointShape,
    names: Iterable[str],
    at: Coordinates,
    moments: Moments | None = None,
) -> list[TrainedSlice]:
    """List every slice whose master weight is on this rank, in the order of `names`; with their `moments`, if given.

    `names` are those of all tensors of the checkpoint.

    Raises `ConfigError` for a parameter that belongs to no checkpoint tensor.
    """
    pieces = parameter_pieces(chunks, model, at)
    found: dict[str, list[TrainedSlice]] = {name: [] for name in names}
    for master in _masters(optimizer):
        for weight in _cut(master, (moments or {}).get(master.weight, {}), pieces[master.parameter]):
            found[weight.name].append(weight)
    for buffer in (tensor for tensor in pieces if not isinstance(tensor, torch.nn.Parameter)):
        for piece in pieces[buffer]:
            found[piece.name].append(TrainedSlice(piece.name, piece.place(piece.box), buffer[piece.box.index], {}))
    return [piece for slices in found.values() for piece in slices]


def shards_of(
    slices: Iterable[TrainedSlice],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    device: torch.device,
) -> list[LocalShard]:
    """List views of the float32 master weights, whatever the compute dtype; empty ones for tensors on other ranks.

    Ranks hold the same elements where megatron-core repeats them: data parallel copies without the distributed optimizer, norms
    and routers over tensor parallel ranks, a tied embedding on the first and last pipeline stage.
    """
    specs = {name: TensorSpec(name, shape, dtypes[name]) for name, shape in shapes.items()}
    held: dict[str, list[LocalShard]] = {name: [] for name in specs}
    for piece in slices:
        held[piece.name].append(LocalShard(specs[piece.name], piece.box.starts, piece.weight))
    nothing = torch.empty(0, device=device)
    return [each for name, shards in held.items() for each in shards or [LocalShard.nothing(specs[name], nothing)]]


def inner_optimizers(optimizer: MegatronOptimizer | FrozenWeights) -> list[Any]:
    """List megatron-core's optimizers of dense and of expert parameters, without those that have none on this rank."""
    if isinstance(optimizer, FrozenWeights):
        return []
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if inner.optimizer is not None]


def megatron_optimizer(
    settings: TrainerConfig,
    config: TransformerConfig,
    chunks: list[torch.nn.Module],
    model: CheckpointShape,
    at: Coordinates,
    stored: Mapping[str, torch.dtype],
) -> MegatronOptimizer | FrozenWeights:
    """Create what holds the master weights of `chunks`: if they are trained, megatron-core's optimizer around our `AdamW`."""
    if not settings.trains_weights:
        return FrozenWeights(chunks, model, at, stored)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=settings.megatron.distributed_optimizer,
        ),
        chunks,
        config_overrides={},  # megatron-core's own would exempt norms from weight decay
        use_gloo_process_groups=False,
    )
    if next(chunks[0].parameters()).is_meta:  # an outline, which takes no steps
        return optimizer
    for inner in inner_optimizers(optimizer):
        inner.optimizer = AdamW(settings.optimizer, inner.optimizer.param_groups)
    return optimizer


def moments_of(optimizer: MegatronOptimizer | FrozenWeights) -> Moments:
    """Return the moments and step count of every master weight, as `AdamW.moments_of`."""
    return {
        master.weight: inner.optimizer.moments_of(master.weight)
        for inner in inner_optimizers(optimizer)
        for master in _masters_in(inner)
    }


def restore_moments(optimizer: MegatronOptimizer | FrozenWeights, moments: Moments) -> None:
    """Hold what was changed in those of `moments_of` that are copies."""
    for inner in inner_optimizers(optimizer):
        for master in _masters_in(inner):
            inner.optimizer.restore(master.weight, moments[master.weight])


def moment_memory(optimizer: MegatronOptimizer | FrozenWeights) -> list[torch.Tensor]:
    """List the tensors that hold the optimizer's state on this rank."""
    return [tensor for inner in inner_optimizers(optimizer) for tensor in inner.optimizer.memory]


def copy_masters_to_model(chunks: Sequence[Any], optimizer: MegatronOptimizer | FrozenWeights) -> None:
    """Make the parameters that forward uses equal to the master weights. Collective with the distributed optimizer."""
    if isinstance(optimizer, FrozenWeights):
        for parameter, master in optimizer.masters:
            parameter.detach().copy_(master)
        return
    distributed = False
    for inner in inner_optimizers(optimizer):
        if isinstance(inner, Float16OptimizerWithFloat16Params | DistributedOptimizer):
            inner._copy_main_params_to_model_params()
        distributed |= isinstance(inner, DistributedOptimizer)
    if distributed:
        for chunk in chunks:
            chunk.start_param_sync(force_sync=True)


def parameter_pieces(
    chunks: Sequence[torch.nn.Module], model: CheckpointShape, at: Coordinates
) -> dict[torch.Tensor, list[CheckpointSlice]]:
    """Return the checkpoint slices of every parameter, and of every buffer in a checkpoint, by tensor."""
    pieces: dict[torch.Tensor, list[CheckpointSlice]] = {}
    for wrapped in chunks:
        chunk = unwrapped(wrapped)
        buffers = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(_UNTRAINED))
        for local_name, tensor in (*chunk.named_parameters(), *buffers):
            name = local_name
            if match := re.match(r"decoder\.layers\.(\d+)\.", local_name):
                number = chunk.decoder.layers[int(match[1])].layer_number - 1
                name = f"decoder.layers.{number}.{local_name[match.end() :]}"
            try:
                pieces[tensor] = pieces_of(name, tuple(tensor.shape), model, at)
            except KeyError:
                raise ConfigError(
                    f"megatron-core's parameter {local_name} is in no checkpoint that this engine knows.",
                    part="megatron engine",
                    hint="Use megatron-core 0.16.",
                ) from None
    return pieces


def _masters(optimizer: MegatronOptimizer | FrozenWeights) -> Iterable[_Master]:
    if isinstance(optimizer, FrozenWeights):
        return [_Master(parameter, 0, master) for parameter, master in optimizer.masters]
    return [master for inner in inner_optimizers(optimizer) for master in _masters_in(inner)]


def _masters_in(inner: Any) -> Iterator[_Master]:
    """Yield what one of megatron-core's optimizers steps."""
    if isinstance(inner, DistributedOptimizer):
        for models, masters in (
            (inner.model_float16_groups, inner.shard_fp32_from_float16_groups),
            (inner.model_fp32_groups, inner.shard_fp32_groups),
        ):
            for parameter, master in _zipped(models, masters):
                yield _Master(parameter, inner._get_model_param_range_map(parameter)["param"].start, master)
    elif isinstance(inner, Float16OptimizerWithFloat16Params):
        for models, masters in (
            (inner.float16_groups, inner.fp32_from_float16_groups),
            (inner.fp32_from_fp32_groups, inner.fp32_from_fp32_groups),
        ):
            for parameter, master in _zipped(models, masters):
                yield _Master(parameter, 0, master)
    else:
        for group in inner.optimizer.param_groups:
            yield from (_Master(parameter, 0, parameter) for parameter in group["params"])


def _zipped(left: Iterable[Iterable[Any]], right: Iterable[Iterable[Any]]) -> Iterator[tuple[Any, Any]]:
    for ours, theirs in zip(left, right, strict=True):
        yield from zip(ours, theirs, strict=True)


def _cut(
    master: _Master, moments: Mapping[str, torch.Tensor], pieces: Sequence[CheckpointSlice]
) -> Iterator[TrainedSlice]:
    """Yield the parts of `pieces` inside the run of `master`, as slices of weight and moments."""
    flat = master.weight.detach().view(-1)
    flats = {key: moments[key].view(-1) for key in MOMENTS if key in moments}
    steps = {STEP: moments[STEP]} if STEP in moments else {}
    at = 0
    for box in boxes_of_run(tuple(master.parameter.shape), master.start, master.weight.numel()):
        weight, *averages = (each[at : at + box.numel].view(box.shape) for each in (flat, *flats.values()))
        at += box.numel
        for piece in pieces:
            common = piece.box.intersect(box)
            if common is None:
                continue
            index = common.within(box).index
            views = {key: piece.turned(average[index]) for key, average in zip(flats, averages, strict=True)}
            yield TrainedSlice(piece.name, piece.place(common), piece.turned(weight[index]), views | steps)


def held_tensors(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """List every parameter and buffer of this rank's parts of the model."""
    modules = [module for chunk in chunks for module in chunk.module.modules()]
    held = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
    return [tensor for tensor in held if tensor is not None]
