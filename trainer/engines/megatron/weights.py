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

from ...config import TrainerConfig
from ..hf.model_dir import half_precision
from ..hf.training_state import TrainedSlice
from ..optimizer_settings import MOMENTS, init_optimizer_state
from .checkpoint import CheckpointShape, CheckpointSlice, Coordinates, checkpoint_shapes, pieces_of

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
        pieces = _pieces(chunks, model, at)
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
    state: Mapping[str, torch.Tensor]


def unwrapped(chunk: Any) -> Any:
    """Return the ``GPTModel`` inside megatron-core's wrappers."""
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk


def weight_slices(
    chunks: Sequence[torch.nn.Module],
    optimizer: MegatronOptimizer | FrozenWeights,
    model: CheckpointShape,
    at: Coordinates,
) -> list[TrainedSlice]:
    """List every slice whose master weight is on this rank, in the order of `checkpoint_shapes`.

    Raises `ConfigError` for a parameter that belongs to no checkpoint tensor.
    """
    pieces = _pieces(chunks, model, at)
    found: dict[str, list[TrainedSlice]] = {name: [] for name in checkpoint_shapes(model)}
    for master in _masters(optimizer):
        for weight in _cut(master, pieces[master.parameter]):
            found[weight.name].append(weight)
    for buffer in (tensor for tensor in pieces if not isinstance(tensor, torch.nn.Parameter)):
        for piece in pieces[buffer]:
            found[piece.name].append(TrainedSlice(piece.name, piece.place(piece.box), buffer[piece.box.index], {}))
    return [piece for slices in found.values() for piece in slices]


def inner_optimizers(optimizer: MegatronOptimizer | FrozenWeights) -> list[Any]:
    """List megatron-core's optimizers of dense and of expert parameters, without those that have none on this rank."""
    if isinstance(optimizer, FrozenWeights):
        return []
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [inner for inner in chained if inner.optimizer is not None]


def megatron_optimizer(
    settings: TrainerConfig, config: TransformerConfig, chunks: list[torch.nn.Module]
) -> MegatronOptimizer:
    """Create megatron-core's AdamW over the parameters of `chunks`, with moments of zeros."""
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=settings.learning_rate,
            weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0],
            adam_beta2=settings.betas[1],
            clip_grad=settings.max_grad_norm,
            bf16=config.bf16,
            params_dtype=config.params_dtype,
            use_distributed_optimizer=settings.megatron.distributed_optimizer,
        ),
        chunks,
        config_overrides={},  # megatron-core's own would exempt norms from weight decay
        use_gloo_process_groups=False,
    )
    for inner in inner_optimizers(optimizer):
        init_optimizer_state(inner.optimizer, torch.device("cpu"))
    return optimizer


def forget_moments(slices: Iterable[TrainedSlice]) -> None:
    """Set the moments of these weights to zero."""
    for moment in (moment for piece in slices for moment in piece.moments.values()):
        moment.zero_()


def set_moment_steps(optimizer: MegatronOptimizer | FrozenWeights, step: int) -> None:
    """Set the step count of the moments, on which their bias correction depends.

    torch's AdamW counts them for each parameter, the fused Adam of Apex and TransformerEngine for each group.
    """
    for inner in inner_optimizers(optimizer):
        for group in inner.optimizer.param_groups:
            group["step"] = step
            for parameter in group["params"]:
                inner.optimizer.state[parameter]["step"].fill_(step)


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


def _pieces(
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


def _masters(optimizer: MegatronOptimizer | FrozenWeights) -> Iterator[_Master]:
    if isinstance(optimizer, FrozenWeights):
        yield from (_Master(parameter, 0, master, {}) for parameter, master in optimizer.masters)
        return
    for inner in inner_optimizers(optimizer):
        state = inner.optimizer.state
        for parameter, start, master in _pairs(inner):
            yield _Master(parameter, start, master.detach(), state[master])


def _pairs(inner: Any) -> Iterable[tuple[torch.nn.Parameter, int, torch.Tensor]]:
    """Yield each model parameter, the first element of its run, and the tensor that the optimizer steps for it."""
    if isinstance(inner, DistributedOptimizer):
        for models, masters in (
            (inner.model_float16_groups, inner.shard_fp32_from_float16_groups),
            (inner.model_fp32_groups, inner.shard_fp32_groups),
        ):
            for parameter, master in _zipped(models, masters):
                yield parameter, inner._get_model_param_range_map(parameter)["param"].start, master
    elif isinstance(inner, Float16OptimizerWithFloat16Params):
        for parameter, master in _zipped(inner.float16_groups, inner.fp32_from_float16_groups):
            yield parameter, 0, master
        for parameter, master in _zipped(inner.fp32_from_fp32_groups, inner.fp32_from_fp32_groups):
            yield parameter, 0, master
    else:
        for group in inner.optimizer.param_groups:
            for parameter in group["params"]:
                yield parameter, 0, parameter


def _zipped(left: Iterable[Iterable[Any]], right: Iterable[Iterable[Any]]) -> Iterator[tuple[Any, Any]]:
    for ours, theirs in zip(left, right, strict=True):
        yield from zip(ours, theirs, strict=True)


def _cut(master: _Master, pieces: Sequence[CheckpointSlice]) -> Iterator[TrainedSlice]:
    """Yield the parts of `pieces` inside the run of `master`, as slices of weight and moments."""
    flat = master.weight.view(-1)
    flats = {key: master.state[key].view(-1) for key in MOMENTS if key in master.state}
    at = 0
    for box in boxes_of_run(tuple(master.parameter.shape), master.start, master.weight.numel()):
        weight, *moments = (each[at : at + box.numel].view(box.shape) for each in (flat, *flats.values()))
        at += box.numel
        for piece in pieces:
            common = piece.box.intersect(box)
            if common is None:
                continue
            index = common.within(box).index
            views = {key: piece.turned(moment[index]) for key, moment in zip(flats, moments, strict=True)}
            yield TrainedSlice(piece.name, piece.place(common), piece.turned(weight[index]), views)


def held_tensors(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """List every parameter and buffer of this rank's parts of the model."""
    modules = [module for chunk in chunks for module in chunk.module.modules()]
    held = [tensor for module in modules for tensor in (*module._parameters.values(), *module._buffers.values())]
    return [tensor for tensor in held if tensor is not None]
