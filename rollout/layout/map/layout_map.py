"""Where every element of every checkpoint tensor lands in one rank's live parameters, as plain data.

Offsets and strides count elements. Those of a source refer to the contiguous checkpoint tensor; those of a target to the storage
of the parameter, so that parameters which share memory are told apart by nothing but their offsets.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from weightlane.ckpt_engines import ProtocolError


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """One checkpoint tensor as it is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """One live parameter or buffer: a view of a storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TargetSpec:
        """The view that `tensor` is."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Slice:
    """A block of `shape` whose elements are copied from a source into a target: ``as_strided`` on both sides."""

    source: str
    source_offset: int
    source_strides: tuple[int, ...]
    target: str
    target_offset: int
    target_strides: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Constant:
    """A block of a target that loading fills with one value, such as the padding rows of a vocabulary."""

    target: str
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    value: float

    @property
    def numel(self) -> int:
        """Its number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Refusal:
    """Something that is no copy: it has to go through the model's own loading."""

    tensor: str
    """A checkpoint tensor, or a live parameter."""
    why: str


@dataclass
class LayoutMap:
    """What one rank's loading does with one set of checkpoint tensors.

    Attributes:
        sources: The tensors it was traced with.
        targets: The live parameters, and the buffers that loading writes.
        slices: The copies, in the order in which loading makes them.
        constants: What is filled, before any copy.
        refused_sources: Tensors whose loading failed on tensors without data, or took their values apart.
        refused_targets: Parameters that get something other than copies of checkpoint elements.
        feeds: A tensor and the parameter that gets something made of it, for everything that is no copy.
    """

    sources: dict[str, SourceSpec]
    targets: dict[str, TargetSpec]
    slices: list[Slice] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    refused_sources: list[Refusal] = field(default_factory=list)
    refused_targets: list[Refusal] = field(default_factory=list)
    feeds: list[tuple[str, str]] = field(default_factory=list)

    def without(self, sources: Iterable[str], targets: Iterable[str]) -> LayoutMap:
        """The part of it that neither reads `sources` nor writes `targets`, with nothing refused."""
        read, written = set(sources), set(targets)
        return LayoutMap(
            {name: spec for name, spec in self.sources.items() if name not in read},
            {name: spec for name, spec in self.targets.items() if name not in written},
            [piece for piece in self.slices if piece.source not in read and piece.target not in written],
            [constant for constant in self.constants if constant.target not in written],
        )

    def copies(self, tied: Mapping[str, str]) -> tuple[object, ...]:
        """What it copies, for comparison: sources under the names that `tied` has for them, whatever their types."""
        slices = {replace(piece, source=tied.get(piece.source, piece.source)) for piece in self.slices}
        return slices, set(self.constants), self.targets

    @property
    def bytes_copied(self) -> int:
        """Bytes that one commit writes by copying."""
        return sum(piece.numel * self.targets[piece.target].dtype.itemsize for piece in self.slices)

    def to_plain(self) -> dict[str, Any]:
        """As JSON data."""
        return {
            "sources": {name: [list(spec.shape), _name(spec.dtype)] for name, spec in self.sources.items()},
            "targets": {
                name: [list(spec.shape), list(spec.strides), spec.offset, _name(spec.dtype)]
                for name, spec in self.targets.items()
            },
            "slices": [
                [
                    piece.source,
                    piece.source_offset,
                    list(piece.source_strides),
                    piece.target,
                    piece.target_offset,
                    list(piece.target_strides),
                    list(piece.shape),
                ]
                for piece in self.slices
            ],
            "constants": [
                [constant.target, constant.offset, list(constant.strides), list(constant.shape), constant.value]
                for constant in self.constants
            ],
            "refused_sources": [[refusal.tensor, refusal.why] for refusal in self.refused_sources],
            "refused_targets": [[refusal.tensor, refusal.why] for refusal in self.refused_targets],
            "feeds": [list(pair) for pair in self.feeds],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> LayoutMap:
        """The inverse of `to_plain`; raises `ProtocolError` for anything else."""
        try:
            return cls(
                {name: SourceSpec(tuple(shape), _dtype(dtype)) for name, (shape, dtype) in plain["sources"].items()},
                {
                    name: TargetSpec(tuple(shape), tuple(strides), offset, _dtype(dtype))
                    for name, (shape, strides, offset, dtype) in plain["targets"].items()
                },
                [
                    Slice(source, start, tuple(steps), target, offset, tuple(strides), tuple(shape))
                    for source, start, steps, target, offset, strides, shape in plain["slices"]
                ],
                [
                    Constant(target, offset, tuple(strides), tuple(shape), value)
                    for target, offset, strides, shape, value in plain["constants"]
                ],
                [Refusal(*pair) for pair in plain["refused_sources"]],
                [Refusal(*pair) for pair in plain["refused_targets"]],
                [(source, target) for source, target in plain["feeds"]],
            )
        except (KeyError, TypeError, ValueError, AttributeError) as cause:
            raise ProtocolError(f"not a layout map: {type(cause).__name__}: {cause}", part="layout map") from cause


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name} is no data type")
    return dtype
