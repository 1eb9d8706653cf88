"""The tensors of a version of which slices have come, each put together when it is asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

import torch

from weightlane.ckpt_engines import CommitError

from .box import Box
from .manifest import Slicing


class LazyTensors(Mapping[str, torch.Tensor]):
    """By name. Each takes memory of its own once it is asked for."""

    @abstractmethod
    def without_data(self, name: str) -> torch.Tensor:
        """What `name` gives, on the meta device."""


def without_data(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with the shapes and types of `tensors`, without making any of those that are made when asked for."""
    if isinstance(tensors, LazyTensors):
        return {name: tensors.without_data(name) for name in tensors}
    return dict(tensors)


class SlicedTensors(LazyTensors):
    """Every tensor of the checkpoint by name. What has come in one piece is that piece, anything else a new tensor each time.

    Args:
        slicing: Which slices of which tensors have come.
        staged: These slices, in that order, by the names under which they came.
    """

    def __init__(self, slicing: Slicing, staged: Mapping[str, torch.Tensor]) -> None:
        self.slicing = slicing
        """The same object for all versions of a session."""
        self.staged = staged
        """What has come, by the names under which it came."""
        self.regions = dict(zip(staged, slicing.regions, strict=True))
        """Which slice of which tensor each of that is."""
        self._specs = {spec.name: spec for spec in slicing.specs}
        self._parts: dict[str, list[tuple[Box, str]]] = defaultdict(list)
        for name, region in self.regions.items():
            self._parts[region.spec.name].append((region.box, name))

    def __getitem__(self, name: str) -> torch.Tensor:
        """All of a tensor. `CommitError` if only slices of it have come."""
        if not self.has(name, [Box.whole(self._specs[name].shape)]):
            raise CommitError(
                f"{name} was to be loaded whole, and only the slices that this rank needs have come.",
                part="sliced version",
                hint="The next version brings all of it.",
            )
        return self.partly(name)

    def __contains__(self, name: object) -> bool:
        return name in self._specs

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)

    def has(self, name: str, boxes: Iterable[Box]) -> bool:
        """Whether every element of `boxes` of a tensor has come."""
        parts = [part for part, _ in self._parts.get(name, ())]
        return all(
            sum(common.numel for part in parts if (common := box.intersect(part)) is not None) == box.numel
            for box in boxes
        )

    @torch.no_grad()
    def partly(self, name: str) -> torch.Tensor:
        """A tensor with what has come of it; the rest is undefined."""
        spec = self._specs[name]
        parts = [(box, self.staged[part]) for box, part in self._parts.get(name, ())]
        if len(parts) == 1 and parts[0][0] == Box.whole(spec.shape):
            return parts[0][1]
        device = parts[0][1].device if parts else torch.device("cpu")
        whole = torch.empty(spec.shape, dtype=spec.dtype, device=device)
        for box, values in parts:
            whole[box.index].copy_(values)
        return whole

    def without_data(self, name: str) -> torch.Tensor:
        """See `LazyTensors`."""
        spec = self._specs[name]
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")


class Pieces(LazyTensors):
    """Some of what has come: slices under the names under which they came, and under a tensor's own what has come of it.

    Args:
        tensors: What has come.
        names: Of slices, and of tensors.
    """

    def __init__(self, tensors: SlicedTensors, names: Iterable[str]) -> None:
        self._tensors = tensors
        self._kinds = without_data(tensors.staged)
        self._names = dict.fromkeys(names)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors.staged[name] if name in self._kinds else self._tensors.partly(name)

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def without_data(self, name: str) -> torch.Tensor:
        """See `LazyTensors`."""
        return self._kinds[name] if name in self._kinds else self._tensors.without_data(name)
