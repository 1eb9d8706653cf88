"""The mesh of FSDP2 ranks, with or without tensor and context parallelism: shares of a batch, and the reduction of gradients."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from weightlane.ckpt_engines import ConfigError

from ...config import Fsdp2Config, TrainerConfig
from ..rank_collectives import ContextRanks

_PART = "fsdp2 engine"
_STYLES: dict[str, type[ParallelStyle]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
_REFUSED = {"mla_kv_a_proj"}
"""Styles in transformers' plans whose partial gradients `complete_gradients` does not complete."""


def check_mesh(config: TrainerConfig, model_dir: Path) -> None:
    """Raise `ConfigError` when the ranks, or the model's heads, cannot be divided as `config` says."""
    tensor_parallel, context_parallel = config.fsdp2.tensor_parallel, config.fsdp2.context_parallel
    if config.ranks % (tensor_parallel * context_parallel):
        degrees = {"tensor_parallel": tensor_parallel, "context_parallel": context_parallel}
        named = " x ".join(f"trainer.fsdp2.{name} = {degree}" for name, degree in degrees.items() if degree > 1)
        raise ConfigError(
            f"trainer.ranks is {config.ranks}, which {named} does not divide.",
            part=_PART,
            hint="Each group of tensor_parallel x context_parallel ranks is one data parallel rank.",
        )
    if tensor_parallel == 1:
        return
    model = json.loads((model_dir / "config.json").read_text())
    for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        count = model.get(key)
        if isinstance(count, int) and count % tensor_parallel:
            raise ConfigError(
                f"trainer.fsdp2.tensor_parallel = {tensor_parallel} does not divide the model's {key}, {count}.",
                part=_PART,
                hint="Choose a tensor_parallel that divides heads, key and value heads, and the intermediate size.",
            )


_GROUPS: dict[tuple[str, float], dist.ProcessGroup] = {}
"""The groups of this process, by all rows and the timeout."""


def _group_among(rows: torch.Tensor, timeout_s: float) -> dist.ProcessGroup:
    """Return the group of those ranks, of the `rows` of ranks, with which this one is in a row. Collective when it is made.

    It lives as long as torch's own, and every later mesh of these rows uses it: torch keeps compiled operations by meshes that
    compare equal, so they use groups of an earlier mesh anyway; and each group of gloo has threads, which wake all the time.
    """
    key = (str(rows.tolist()), timeout_s)
    with suppress(KeyError):
        dist.get_process_group_ranks(_GROUPS[key])  # raises for a group that ended with torch's own
        return _GROUPS[key]
    timeout = timedelta(seconds=timeout_s)  # with `init_device_mesh`, it would have torch's half an hour
    _GROUPS[key], _ = dist.new_subgroups_by_enumeration(rows.tolist(), timeout=timeout)  # type: ignore[no-untyped-call]
    return _GROUPS[key]


@dataclass(frozen=True, slots=True)
class RankMesh:
    """The trainer ranks: neighbours that share every matrix, groups of such that share tokens, and data parallel copies.

    Attributes:
        data: The ranks that hold the same part of every matrix, between which FSDP2 shards: those that share tokens are
            neighbours in it.
        tensor: The ranks that share matrices; None if each rank has full matrices.
        context: The ranks that share the tokens of a micro-batch; None if each rank has whole ones.
    """

    data: DeviceMesh
    tensor: DeviceMesh | None
    context: ContextRanks | None

    @property
    def data_share(self) -> tuple[int, int]:
        """This rank's share of a batch, and the number of shares."""
        each = 1 if self.context is None else self.context.count
        return self.data.get_local_rank() // each, self.data.size() // each

    @property
    def first_of_tensor(self) -> bool:
        """Whether this rank is the first of those that share matrices with it."""
        return self.tensor is None or self.tensor.get_local_rank() == 0

    @property
    def answers(self) -> bool:
        """Whether this rank returns the outputs of its share: of ranks that share matrices or tokens, the first does."""
        return self.first_of_tensor and (self.context is None or self.context.index == 0)

    @classmethod
    def of(cls, device: torch.device, world: int, config: Fsdp2Config, timeout_s: float) -> RankMesh:
        """Make the mesh of `world` ranks. Collective; collectives in it fail after `timeout_s` seconds."""
        tensor, context = config.tensor_parallel, config.context_parallel
        ranks = torch.arange(world).view(-1, tensor)
        sharing = None
        if context > 1:
            group = _group_among(ranks.T.reshape(-1, context), timeout_s)
            sharing = ContextRanks(group, dist.get_rank(group), context)
        if tensor == 1:
            return cls(init_device_mesh(device.type, (world,), mesh_dim_names=("fsdp",)), None, sharing)
        groups = [_group_among(rows, timeout_s) for rows in (ranks.T, ranks)]
        mesh = DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=("fsdp", "tp"))
        return cls(mesh["fsdp"], mesh["tp"], sharing)

    def shard(
        self, model: torch.nn.Module, layers: Sequence[torch.nn.Module], config: TrainerConfig, dtype: torch.dtype
    ) -> None:
        """Shard decoder layers and root of a transformers model in place: parameters become DTensors that compute in `dtype`.

        Raises:
            ConfigError: transformers has no plan for dividing this architecture's matrices.
        """
        if self.tensor is not None:
            parallelize_module(model, self.tensor, parallel_styles(model))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        for layer in layers:
            if config.activation_checkpointing:
                checkpoint(layer)
            fully_shard(layer, mesh=self.data, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)
        fully_shard(model, mesh=self.data, mp_policy=policy, reshard_after_forward=config.reshard_after_forward)

    def complete_gradients(self, model: torch.nn.Module) -> None:
        """All-reduce, over the ranks that share matrices, gradients of which each has only its own heads' part. Collective."""
        if self.tensor is None:
            return
        for _, parameter, _ in _between_split_layers(model):
            if parameter.grad is not None:
                grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                whole = grad.contiguous()
                dist.all_reduce(whole, group=self.tensor.get_group())
                if whole is not grad:
                    grad.copy_(whole)


def parallel_styles(model: torch.nn.Module) -> dict[str, ParallelStyle]:
    """Return the styles with which transformers' own plan splits linear layers, by their names. Other modules are not split.

    Raises:
        ConfigError: transformers has no plan for splitting this architecture's matrices, or one that isn't supported here.
    """
    odd = [name for name, module in model.named_modules() if _style(model, name) in _REFUSED]
    odd += [name for name, _, is_whole in _between_split_layers(model) if not is_whole]
    if odd:
        raise ConfigError(
            f"{type(model).__name__} divides {odd[0]} in a way that fsdp2 doesn't know.",
            part=_PART,
            hint="Set trainer.fsdp2.tensor_parallel to 1, or trainer.engine to megatron.",
        )
    styles: dict[str, ParallelStyle] = {
        name: _STYLES[style]()
        for name, module in model.named_modules()
        if (style := _split_style(model, name, module)) is not None
    }
    if not styles:
        raise ConfigError(
            f"transformers has no tensor parallel plan for {type(model).__name__}.",
            part=_PART,
            hint="Set trainer.fsdp2.tensor_parallel to 1.",
        )
    return styles


def _between_split_layers(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter, bool]]:
    """Yield the parameters between column-wise and row-wise layers of one module, such as norms of each head's queries and keys.

    Every rank computes with its own heads there, so gradients are partial; transformers' plans do not name all of them.
    Each comes with its name, and with whether it has the shape of one head or number, so that every rank computes with all of it.
    """
    for name, module in model.named_modules():
        children = {child: _split_style(model, f"{name}.{child}", each) for child, each in module.named_children()}
        if not set(_STYLES) <= set(children.values()):
            continue
        head = (getattr(module, "head_dim", None),)
        for key, parameter in module.named_parameters():
            child, _, inside = key.partition(".")
            if children.get(child) is None:
                yield f"{name}.{key}", parameter, parameter.numel() == 1 or (inside != "" and parameter.shape == head)


def _split_style(model: torch.nn.Module, name: str, module: torch.nn.Module) -> str | None:
    """Return the style in which the layer `module` is split; None if it is not."""
    style = _style(model, name) if isinstance(module, torch.nn.Linear) else None
    return style if style in _STYLES else None


def _style(model: torch.nn.Module, module: str) -> str | None:
    """Return the style of a module in transformers' plan, looked up by name."""
    plan: dict[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    inner = module.removeprefix(f"{getattr(model, 'base_model_prefix', '')}.")
    return next((style for pattern, style in plan.items() if fnmatch.fnmatchcase(inner, pattern)), None)
