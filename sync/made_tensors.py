"""Tensors of a version that are not there as they are wanted, and are made when they are asked for."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch


class MadeTensors(Mapping[str, torch.Tensor]):
    """By name. Each takes memory of its own once it is asked for."""

    @abstractmethod
    def without_data(self, name: str) -> torch.Tensor:
        """What `name` gives, on the meta device."""


def without_data(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors with the shapes and types of `tensors`, without making any of those that are made when asked for."""
    if isinstance(tensors, MadeTensors):
        return {name: tensors.without_data(name) for name in tensors}
    return dict(tensors)
