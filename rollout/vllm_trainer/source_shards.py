"""The shards that a trainer rank publishes of a ``WeightSource``, vLLM's stream of a trainer's weights.

vLLM's ``ModuleSource`` is never iterated: the shards are views of the module's parameters, or of this rank's slices of them.
Nothing is gathered, and nothing is copied before the snapshot. Any other source yields tensors in memory of its own. Each rank
copies those that it holds into memory that stays in place: see `SourceStream`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.tensor import DTensor
from vllm.distributed.weight_transfer.base import ModuleSource, ParamMeta, WeightSource

from weightlane.ckpt_engines import ManifestError
from weightlane.sync import LocalShard, TensorSpec, dtype_name
from weightlane.sync.torchrun.module_slices import held_slice, live_tensors
from weightlane.sync.version.tensor_spec import kept_in_float32

from ..vllm_surface import check_attributes
from .source_streams import ORDER_HINT, PART, metadata_of, stream_of


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
        ConfigError: A parameter is a partial sum, or the source yields nothing.
        ManifestError: A tensor has a dtype that cannot be sent, or was not declared.
    """
    if type(source) is ModuleSource:
        return _ModuleShards(source, rank, wire_dtype)
    return _CopiedShards(source, rank, wire_dtype)


class _ModuleShards:
    """Views of the parameters of a ``ModuleSource``'s module."""

    def __init__(self, source: ModuleSource, rank: int, wire_dtype: torch.dtype | None) -> None:
        check_attributes(source, "_module", "a ModuleSource")
        module: torch.nn.Module = source._module
        specs = _specs(metadata_of(source), wire_dtype)
        self.shards: list[LocalShard] = []
        device = torch.device("cpu")
        parameters = dict(module.named_parameters())
        live = live_tensors(module, parameters)
        for name, parameter in parameters.items():
            box, data = held_slice(name, parameter, PART)
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
    """Copies of the tensors, or slices, that a source yields on this rank."""

    def __init__(self, source: WeightSource, rank: int, wire_dtype: torch.dtype | None) -> None:
        metadata = metadata_of(source)
        self._dtypes = {meta.name: meta.dtype for meta in metadata}
        specs = _specs(metadata, wire_dtype)
        self._stream = stream_of(source, rank)
        self._copies = {
            name: torch.empty(box.shape, dtype=specs[name].dtype) for name, box in self._stream.held.items()
        }
        shards = [LocalShard(specs[name], box.starts, self._copies[name]) for name, box in self._stream.held.items()]
        self.shards = [shard for shard in shards if shard.data.numel() or not shard.spec.numel] or _no_elements(
            specs, torch.device("cpu")
        )

    @torch.no_grad()
    def refresh(self) -> None:
        """Iterate the source, and copy what this rank holds.

        Raises:
            ManifestError: The source yields other tensors than it has declared.
        """
        yielded = self._stream.tensors()
        try:
            if self._copies:
                self._copy(yielded)
        finally:
            for _ in yielded:
                pass  # other ranks gather their tensors with this one

    def _copy(self, yielded: Iterator[tuple[str, torch.Tensor | None]]) -> None:
        declared = iter(self._stream.names())
        for name, tensor in yielded:
            expected = next(declared, None)
            if name != expected:
                wanted = expected or "nothing more"
                raise ManifestError(f"it yields {name}, and {wanted} was declared.", part=PART, hint=ORDER_HINT)
            if (copy := self._copies.get(name)) is None:
                continue
            if tensor is None or (tensor.dtype, tensor.shape) != (self._dtypes[name], copy.shape):
                raise ManifestError(
                    f"{name} was declared {dtype_name(self._dtypes[name])} {list(copy.shape)}, and is {_described(tensor)}.",
                    part=PART,
                    hint="Declare the tensor as it is yielded.",
                )
            copy.copy_(tensor)
        if (missing := next(declared, None)) is not None:
            raise ManifestError(f"it ends before {missing}.", part=PART, hint=ORDER_HINT)


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
