"""`LayoutMap`: where every element of every checkpoint tensor lands in one rank's live parameters, as plain data.

Offsets and strides count elements. A source's offsets refer to the contiguous checkpoint tensor. A target's offsets refer to the
storage of the parameter, so that parameters which share a storage differ in their offsets only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import torch


@dataclass(frozen=True, slots=True)
class SourceSpec:
    """Shape and dtype of one checkpoint tensor as it is sent."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class TargetSpec:
    """Shape, strides, offset and dtype of one live parameter or buffer: a view of a storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TargetSpec:
        """The spec of `tensor`."""
        return cls(tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset()), tensor.dtype)


@dataclass(frozen=True, slots=True)
class LayoutCopy:
    """A copy of a block of `shape` from a source into a target: ``as_strided`` on both sides."""

    source: str
    source_offset: int
    source_strides: tuple[int, ...]
    target: str
    target_offset: int
    target_strides: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Constant:
    """A block of a target that loading fills with one value, such as the padding rows of a vocabulary."""

    target: str
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    value: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A tensor that copies cannot fill, so that it has to go through the model's own loading."""

    tensor: str
    """A checkpoint tensor, or a live parameter."""
    why: str


@dataclass
class LayoutMap:
    """The copies that one rank's loading makes of one set of checkpoint tensors.

    Attributes:
        sources: The tensors that loading was traced with.
        targets: The live parameters, and the buffers that loading writes.
        copies: The copies, in the order in which loading makes them.
        constants: The blocks that are filled before any copy.
        refused_sources: Tensors whose loading failed on tensors without data, or computed with their values.
        refused_targets: Parameters that get something other than copies of checkpoint elements.
        feeds: A tensor and the parameter that is computed from it, for everything that is no copy.
    """

    sources: dict[str, SourceSpec]
    targets: dict[str, TargetSpec]
    copies: list[LayoutCopy] = field(default_factory=list)
    constants: list[Constant] = field(default_factory=list)
    refused_sources: list[Refusal] = field(default_factory=list)
    refused_targets: list[Refusal] = field(default_factory=list)
    feeds: list[tuple[str, str]] = field(default_factory=list)

    @property
    def uncopied_sources(self) -> set[str]:
        """Tensors that are refused, or from which something is computed."""
        return {refusal.tensor for refusal in self.refused_sources} | {source for source, _ in self.feeds}

    def without(self, sources: Iterable[str], targets: Iterable[str]) -> LayoutMap:
        """The part of the layout that neither reads `sources` nor writes `targets`, with nothing refused."""
        read, written = set(sources), set(targets)
        return LayoutMap(
            {name: spec for name, spec in self.sources.items() if name not in read},
            {name: spec for name, spec in self.targets.items() if name not in written},
            [copy for copy in self.copies if copy.source not in read and copy.target not in written],
            [constant for constant in self.constants if constant.target not in written],
        )

    def comparable(self, names: Mapping[str, str]) -> tuple[object, ...]:
        """Copies, constants and targets, equal for layouts that differ in source dtypes or in names that `names` maps."""
        copies = {replace(copy, source=names.get(copy.source, copy.source)) for copy in self.copies}
        return copies, set(self.constants), self.targets

    @property
    def bytes_copied(self) -> int:
        """Bytes that one commit writes by copying."""
        return sum(copy.numel * self.targets[copy.target].dtype.itemsize for copy in self.copies)
