"""`RankLoader`: writes versions into one rank's model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch

from weightlane.ckpt_engines import CommitError, ConfigError
from weightlane.sync import Expectation, IncomingDelta, LivePart, Placement

from .rank_group import RankGroup


class SwappableDelta(Protocol):
    """Changed elements, located in the live weights of a rank."""

    version: int
    """The version that the delta makes."""
    base_version: int | None
    """The version that it changes."""
    mixed: bool
    """Whether a failed `swap` has left some elements in the weights."""

    def check(self) -> None:
        """Raise an error if it can no longer be applied."""

    def swap(self) -> None:
        """Exchange the elements with those in the weights: the second call undoes the first."""


class ShapeAndDtype(Protocol):
    """A tensor, or the description of one."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape."""

    @property
    def dtype(self) -> torch.dtype:
        """The data type."""


class RankLoader(ABC):
    """Loads versions into one rank's model, for a `LiveWeights`. All ranks of a replica make every call together."""

    part: str
    """Name of the rank in errors."""
    device: torch.device
    expectation: Expectation
    """The tensors that a version has to have."""
    writes_atomically = False
    """Whether a `write` or `settle` that fails, or has just failed, has changed nothing."""

    def needed(self) -> Placement | None:
        """The slices that this rank needs of a version; None if it needs all tensors completely."""
        return None

    @property
    def takes_deltas(self) -> bool:
        """Whether `live_delta` can write changed elements straight into the weights. Otherwise a copy of a version is kept."""
        return False

    def live_delta(self, delta: IncomingDelta) -> SwappableDelta:
        """Locate the elements of `delta`, without changing anything."""
        raise CommitError(f"version {delta.version} is a delta, which this model does not take.", part=self.part)

    def before_update(self) -> None:  # noqa: B027 - optional
        """Called before every update, while the weights are still one version."""

    def replaced_storages(self) -> Mapping[int, torch.UntypedStorage]:
        """The memory of which every version writes every byte, by torch's id of the storage. Other memory may not be lost."""
        return {}

    def learn(  # noqa: B027 - optional
        self, specs: Mapping[str, ShapeAndDtype], group: RankGroup, *, sliced: bool = False
    ) -> None:
        """Find out how a version with tensors of these `specs` is written. Changes nothing; raises if it cannot be.

        `sliced` says whether the slices that were `needed` have been received of it.
        """

    @abstractmethod
    def write(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Replace every weight. A failure may leave a mixture."""

    def write_arriving(self, parts: Iterator[LivePart]) -> None:  # noqa: ARG002 - for loaders that can
        """Replace every weight bucket by bucket, for ``commit = "in_place"``."""
        raise ConfigError("this model cannot be written in place.", part=self.part)

    def settle(self) -> None:  # noqa: B027 - optional
        """Wait until the device has written everything, and raise `QuarantinedError` if the model cannot compute with it."""
