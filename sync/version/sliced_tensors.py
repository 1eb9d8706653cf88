"""The tensors of a version that is received in slices, each assembled on access."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import CommitError

from .box import Box
from .tensor_spec import TensorSlice, TensorSpec


@dataclass(frozen=True, slots=True)
class Slicing:
    """The slices that are the tensors of a stream, from a transfer plan."""

    plan: str
    """The plan's digest."""
    specs: tuple[TensorSpec, ...]
    """Every tensor of the checkpoint."""
    regions: tuple[TensorSlice, ...]
    """For each tensor of the stream, the slice of a checkpoint tensor that it is."""


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name that are allocated on access."""

    _listed: Mapping[str, TensorSpec]
    """Shape and dtype of every tensor, by name."""

    def without_data(self, name: str) -> torch.Tensor:
        """The tensor `name` on the meta device."""
        spec = self._listed[name]
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    def __contains__(self, name: object) -> bool:
        return name in self._listed

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)


def without_data(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with the shapes and dtypes of `tensors`: on the meta device for `LazyTensors`, which are not allocated."""
    if isinstance(tensors, LazyTensors):
        return {name: tensors.without_data(name) for name in tensors}
    return dict(tensors)


class SlicedTensors(LazyTensors):
    """Every tensor of the checkpoint, by name.

    A tensor that arrived in one slice is not copied. Any other is assembled as a new tensor at each access.

    Args:
        slicing: The slices that arrived.
        staged: The values of these slices, in the same order, by their names in the stream.
    """

    def __init__(self, slicing: Slicing, staged: Mapping[str, torch.Tensor]) -> None:
        self.slicing = slicing
        """The same object for all versions of a session."""
        self.staged = staged
        """The values of every slice, by its name in the stream."""
        self.regions = dict(zip(staged, slicing.regions, strict=True))
        """Every slice, by its name in the stream."""
        self._listed = {spec.name: spec for spec in slicing.specs}
        self._parts: dict[str, list[tuple[Box, str]]] = defaultdict(list)
        for name, region in self.regions.items():
            self._parts[region.spec.name].append((region.box, name))

    def __getitem__(self, name: str) -> torch.Tensor:
        """The full tensor. Raises `CommitError` if some of its elements have not arrived."""
        if not self.has(name, [Box.whole(self._listed[name].shape)]):
            raise CommitError(
                f"{name} was to be loaded whole, and only the slices that this rank needs have arrived.",
                part="sliced version",
                hint="The next version brings all of it.",
            )
        return self.partly(name)

    def has(self, name: str, boxes: Iterable[Box]) -> bool:
        """Whether every element in `boxes` of the tensor `name` has arrived."""
        parts = [part for part, _ in self._parts.get(name, ())]
        return all(
            sum(common.numel for part in parts if (common := box.intersect(part)) is not None) == box.numel
            for box in boxes
        )

    @torch.no_grad()
    def partly(self, name: str) -> torch.Tensor:
        """The tensor `name` with the elements that arrived; the values of the others are undefined."""
        spec = self._listed[name]
        parts = [(box, self.staged[part]) for box, part in self._parts.get(name, ())]
        if len(parts) == 1 and parts[0][0] == Box.whole(spec.shape):
            return parts[0][1]
        device = parts[0][1].device if parts else torch.device("cpu")
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        for box, values in parts:
            whole[box.index].copy_(values)
        return whole


class SelectedTensors(LazyTensors):
    """Selected slices and tensors of a version: slices by their names in the stream, tensors (see `partly`) by their own."""

    def __init__(self, tensors: SlicedTensors, names: Iterable[str]) -> None:
        self._tensors, regions = tensors, tensors.regions
        self._listed = {name: regions[name].as_tensor if name in regions else tensors._listed[name] for name in names}

    def __getitem__(self, name: str) -> torch.Tensor:
        tensors = self._tensors
        return tensors.staged[name] if name in tensors.regions else tensors.partly(name)
