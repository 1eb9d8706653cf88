"""Passes over a ``WeightSource``: the tensors, or the slices of them, that it yields on this rank, and their order.

vLLM 0.33 has another interface than 0.28 to 0.32: ``metadata`` is no method, it names the ranks that own a tensor, and a source
may yield each rank's slice in place of full tensors. Both are understood, whichever vLLM is installed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, materialize_full_tensor

from weightlane.ckpt_engines import ConfigError, ManifestError
from weightlane.sync.version.box import Box

PART = "weight source"
ORDER_HINT = "The metadata and each pass must list the same tensors in the same order."


class SourceStream(Protocol):
    """Tensors or slices that a source yields on one rank."""

    @property
    def held(self) -> Mapping[str, Box]:
        """The tensors that this rank publishes, and the slice of each that the source yields here."""

    def names(self) -> Iterable[str]:
        """Names of all tensors of a pass, in order."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """One pass. Collective where the source is; yields None for a tensor that another rank holds."""


def metadata_of(source: WeightSource) -> Sequence[ParamMeta]:
    """The declarations of `source`, one for every tensor of the model."""
    declared = source.metadata
    found: Sequence[ParamMeta] = declared() if callable(declared) else declared
    return found


def stream_of(source: WeightSource, rank: int) -> SourceStream:
    """The stream of `source` on trainer rank `rank`.

    Raises:
        ConfigError: The source yields neither full tensors nor slices.
        ManifestError: This rank holds a tensor that the source does not declare.
    """
    return _OwnedTensors(source, rank) if hasattr(source, "iter_full") else _GroupedTensors(source, rank)


class _GroupedTensors:
    """The stream of a source for vLLM 0.28 to 0.32."""

    def __init__(self, source: WeightSource, rank: int) -> None:
        self._source = source
        declared = {meta.name: meta for meta in metadata_of(source)}
        # vLLM 0.28 has neither names nor groups.
        held = source.held_names() if hasattr(source, "held_names") else None
        of_source, usual = (getattr(cls, "iter_groups", None) for cls in (type(source), WeightSource))
        self._grouped = held is not None or of_source is not usual
        self._declared = list(declared)
        self.held = _boxes((self._declared if rank == 0 else ()) if held is None else held, declared)

    def names(self) -> Iterable[str]:
        if not self._grouped:
            return self._declared
        return (name for group in self._source.groups() for name in group)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        if not self._grouped:
            for name, tensor in self._source:
                yield name, materialize_full_tensor(tensor)
            return
        for names, tensors in self._source.iter_groups():
            for name, tensor in zip(names, tensors, strict=True):
                yield name, materialize_full_tensor(tensor)


class _OwnedTensors:
    """The stream of a source for vLLM 0.33: slices if it can yield them, because nothing is gathered for those."""

    def __init__(self, source: WeightSource, rank: int) -> None:
        self._source = source
        self._sliced = source.implements_iter_local()
        if not self._sliced and not source.implements_iter_full():
            raise ConfigError(
                f"{type(source).__name__} implements neither iter_full nor iter_local.",
                part=PART,
                hint="A source yields full tensors, or this rank's slices.",
            )
        declared = {meta.name: meta for meta in metadata_of(source)}
        self._owned = list(source.owned_names(rank))
        boxes = _boxes(self._owned, declared)
        # What every rank has is published by rank 0.
        mine = [name for name in boxes if rank == 0 or declared[name].owners is not None]
        self.held = {name: slice_of(declared[name], rank) if self._sliced else boxes[name] for name in mine}

    def names(self) -> Iterable[str]:
        return self._owned

    def tensors(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        if self._sliced:
            yield from self._source.iter_local()
            return
        for name, tensor in self._source.iter_full():
            yield name, materialize_full_tensor(tensor)


def slice_of(meta: Any, rank: int) -> Box:
    """The slice that ``iter_local`` yields on `rank`: each axis of the mesh splits one dimension as ``torch.chunk``, or none."""
    starts, shape = [0] * len(meta.shape), list(meta.shape)
    if meta.placements is not None:
        place, ranks = meta.owners.index(rank), len(meta.owners)
        for size, placement in zip(meta.mesh_shape, meta.placements, strict=True):
            ranks //= size
            if (dim := getattr(placement, "dim", None)) is None:
                continue  # replicated
            most = -(-shape[dim] // size)
            start = min(place // ranks % size * most, shape[dim])
            starts[dim] += start
            shape[dim] = min(most, shape[dim] - start)
    return Box(tuple(starts), tuple(shape))


def _boxes(names: Iterable[str], declared: Mapping[str, ParamMeta]) -> dict[str, Box]:
    boxes = {}
    for name in names:
        if name not in declared:
            raise ManifestError(f"this rank holds {name}, which the metadata lack.", part=PART, hint=ORDER_HINT)
        boxes[name] = Box.whole(tuple(declared[name].shape))
    return boxes
