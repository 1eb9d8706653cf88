"""The shards that a trainer rank publishes of a ``WeightSource``, vLLM's stream of a trainer's weights.

vLLM's ``ModuleSource`` is never iterated: the shards are views of the module's parameters, or of this rank's slices of them.
Nothing is gathered, and nothing is copied before the snapshot. Any other source yields tensors in memory of its own. Each rank
copies the ones that it holds into memory that stays in place: rank 0 all of them, or every rank those of its ``held_names()``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from vllm.distributed.weight_transfer.base import (
    ModuleSource,
    ParamMeta,
    WeightSource,
    materialize_full_tensor,
)

from weightlane.ckpt_engines import ManifestError
from weightlane.sync import LocalShard, TensorSpec, dtype_name
from weightlane.sync.torchrun.module_slices import held_slice, live_tensors
from weightlane.sync.version.tensor_spec import kept_in_float32

from ..vllm_surface import check_attributes

_PART = "weight source"
_ORDER_HINT = "metadata() and iteration must list the same tensors in the same order."


class SourceShards(Protocol):
    """The shards of one trainer rank."""

    shards: list[LocalShard]

    def refresh(self) -> None:
        """Bring the shards up to date before a version is published. Collective where iterating the source is."""


def source_shards(source: WeightSource, rank: int, wire_dtype: torch.dtype | None) -> SourceShards:
    """The shards of trainer rank `rank`.

    Args:
        source: Its metadata are read, and it is not iterated yet.
        rank: Rank 0 publishes what every rank has.
        wire_dtype: Dtype in which floating-point tensors are sent; None sends each in its own.

    Raises:
        ConfigError: A parameter is a partial sum.
        ManifestError: A tensor has a dtype that cannot be sent.
    """
    if type(source) is ModuleSource:
        return _ModuleShards(source, rank, wire_dtype)
    return _CopiedShards(source, rank, wire_dtype)


class _ModuleShards:
    """Views of the parameters of a ``ModuleSource``'s module."""

    def __init__(self, source: ModuleSource, rank: int, wire_dtype: torch.dtype | None) -> None:
        check_attributes(source, "_module", "a ModuleSource")
        module: torch.nn.Module = source._module
        specs = _specs(source.metadata(), wire_dtype)
        self.shards: list[LocalShard] = []
        device = torch.device("cpu")
        parameters = dict(module.named_parameters())
        live = live_tensors(module, parameters)
        for name, parameter in parameters.items():
            box, data = held_slice(name, parameter, _PART)
            device = data.device
            if data.numel() and (rank == 0 or isinstance(parameter, DTensor)):
                self.shards.append(LocalShard(specs[name], box.starts, data, live[name]))
        self.shards = self.shards or _no_elements(specs, device)

    def refresh(self) -> None:
        """Raise `ManifestError` if a parameter is in other memory than before."""
        for shard in self.shards:
            for live in shard.live:
                live.check()


class _CopiedShards:
    """Copies of the tensors that a source yields on this rank."""

    def __init__(self, source: WeightSource, rank: int, wire_dtype: torch.dtype | None) -> None:
        self._source = source
        metadata = source.metadata()
        self._declared = [(meta.name, meta.dtype, tuple(meta.shape)) for meta in metadata]
        specs = _specs(metadata, wire_dtype)
        # vLLM 0.28 has neither names nor groups.
        held = source.held_names() if hasattr(source, "held_names") else None
        of_source, usual = (getattr(cls, "iter_groups", None) for cls in (type(source), WeightSource))
        self._grouped = held is not None or of_source is not usual
        mine = (specs if rank == 0 else ()) if held is None else held
        if unknown := [name for name in mine if name not in specs]:
            raise ManifestError(f"held_names() has {unknown[0]}, and metadata() has not.", part=_PART, hint=_ORDER_HINT)
        self._copies = {name: torch.empty(specs[name].shape, dtype=specs[name].dtype) for name in mine}
        shards = [LocalShard.whole(specs[name], copy) for name, copy in self._copies.items()]
        self.shards = shards or _no_elements(specs, torch.device("cpu"))

    @torch.no_grad()
    def refresh(self) -> None:
        """Iterate the source, and copy what this rank holds.

        Raises:
            ManifestError: The source yields other tensors than it has declared.
        """
        yielded = self._yielded()
        try:
            if self._copies:
                self._copy(yielded)
        finally:
            for _ in yielded:
                pass  # other ranks gather their tensors with this one

    def _copy(self, yielded: Iterator[tuple[str, torch.Tensor | None]]) -> None:
        declared = self._groups() if self._grouped else iter(self._declared)
        for name, tensor in yielded:
            expected = next(declared, None)
            if expected is None or name != expected[0]:
                wanted = "nothing more" if expected is None else expected[0]
                raise ManifestError(f"it yields {name}, and {wanted} was declared.", part=_PART, hint=_ORDER_HINT)
            if (copy := self._copies.get(name)) is None:
                continue
            if tensor is None or (tensor.dtype, tuple(tensor.shape)) != expected[1:]:
                raise ManifestError(
                    f"{name} was declared {dtype_name(expected[1])} {list(expected[2])}, and is {_described(tensor)}.",
                    part=_PART,
                    hint="Declare the tensor as it is yielded.",
                )
            copy.copy_(tensor)
        if (missing := next(declared, None)) is not None:
            raise ManifestError(f"it ends before {missing[0]}.", part=_PART, hint=_ORDER_HINT)

    def _yielded(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        if not self._grouped:
            for name, tensor in self._source:
                yield name, materialize_full_tensor(tensor)
            return
        for names, tensors in self._source.iter_groups():
            for name, tensor in zip(names, tensors, strict=True):
                yield name, materialize_full_tensor(tensor)

    def _groups(self) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
        """The declared tensors of the groups that this rank iterates."""
        declared = {each[0]: each for each in self._declared}
        return (declared[name] for group in self._source.groups() for name in group)


def _specs(metadata: Sequence[ParamMeta], wire_dtype: torch.dtype | None) -> Mapping[str, TensorSpec]:
    """The tensors as they are sent, by name."""
    kept = kept_in_float32({meta.name: meta.dtype for meta in metadata})

    def on_wire(meta: ParamMeta) -> torch.dtype:
        own: torch.dtype = meta.dtype
        return own if wire_dtype is None or not own.is_floating_point or meta.name in kept else wire_dtype

    return {meta.name: TensorSpec(meta.name, tuple(meta.shape), on_wire(meta)) for meta in metadata}


def _no_elements(specs: Mapping[str, TensorSpec], device: torch.device) -> list[LocalShard]:
    """The shards of a rank that holds nothing: at most one, which has no elements and says on which `device` the rank is."""
    sliced = [spec for spec in specs.values() if spec.shape]
    return [LocalShard.nothing(spec, torch.empty(0, dtype=spec.dtype, device=device)) for spec in sliced[:1]]


def _described(tensor: Any) -> str:
    return "nothing" if tensor is None else f"{dtype_name(tensor.dtype)} {list(tensor.shape)}"
