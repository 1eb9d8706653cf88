"""A decoded delta, which exchanges its values with those of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import ConfigError

from . import cuda_kernels
from .raw import INTEGERS, PART, integer_view

_CHUNK = 1 << 15
"""Elements exchanged at once, so few that their copies and their positions widened to 64 bits stay in the cache."""


@dataclass(frozen=True, slots=True)
class ScatteredValues:
    """New values for single elements of a frame of the segment."""

    base: int
    """The frame's first element, from which positions count."""
    positions: torch.Tensor
    """int32, strictly ascending."""
    values: torch.Tensor
    """Integers of the element size, one for each position."""


@dataclass(frozen=True, slots=True)
class Patch:
    """The decoded changes of one segment. Positions are proven to lie in the segment and to occur once."""

    elements: int
    """Elements of the segment."""
    itemsize: int
    """Bytes of an element."""
    scattered: tuple[ScatteredValues, ...]
    """In the order of their frames; several of one frame have different positions."""

    @property
    def carried(self) -> int:
        """Number of values."""
        return sum(part.values.numel() for part in self.scattered)

    @property
    def nbytes(self) -> int:
        """Memory in bytes: the values, and 4 bytes for the position of each."""
        return self.carried * (self.itemsize + 4)

    def to(self, device: torch.device | str) -> Patch:
        """The patch on another device."""
        scattered = [
            ScatteredValues(run.base, run.positions.to(device), run.values.to(device)) for run in self.scattered
        ]
        return Patch(self.elements, self.itemsize, tuple(scattered))

    def positions_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All changes as positions (int64, ascending, in the segment) and new values (integers of the element size).

        The values may share the patch's memory, which `swap_` changes.
        """
        frames: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for scattered in self.scattered:
            positions = scattered.positions.long().add_(scattered.base)
            frames.setdefault(scattered.base, []).append((positions, scattered.values))
        if not frames:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=INTEGERS[self.itemsize])
        # Sorting takes ten times as long as all the rest, so only frames with several parts are sorted.
        ordered = [_sorted(parts) for parts in frames.values()]
        return _joined([positions for positions, _ in ordered]), _joined([values for _, values in ordered])

    def swap_(self, target: torch.Tensor) -> None:
        """Exchange the patch's values with those of `target`; the same again restores both.

        Args:
            target: The segment's base: contiguous, on the patch's device.

        Raises:
            ConfigError: `target` has another number of elements, element size or layout.
        """
        if (target.numel(), target.itemsize) != (self.elements, self.itemsize):
            raise ConfigError(
                f"a patch for {self.elements} elements of {self.itemsize} bytes was to be put into {target.numel()} of "
                f"{target.itemsize}.",
                part=PART,
                hint="Apply it to the segment it was made for.",
            )
        flat = integer_view(target)
        if flat.device.type != "cpu":
            for run in self.scattered:
                cuda_kernels.exchange(flat[run.base :], run.positions, run.values)
            return
        scratch = torch.empty(_CHUNK, dtype=torch.int64)
        for run in self.scattered:
            _swap_scattered(flat[run.base :], run, scratch)


def _sorted(parts: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """The positions and values of `parts`, each of which ascends."""
    if len(parts) == 1:
        return parts[0]
    positions, order = torch.cat([positions for positions, _ in parts]).sort()
    return positions, torch.cat([values for _, values in parts])[order]


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _swap_scattered(target: torch.Tensor, run: ScatteredValues, scratch: torch.Tensor) -> None:
    for start in range(0, run.positions.numel(), _CHUNK):
        positions = run.positions[start : start + _CHUNK]
        at = scratch[: positions.numel()]
        at.copy_(positions)
        mine = run.values[start : start + _CHUNK]
        old = target.index_select(0, at)
        target.scatter_(0, at, mine)
        mine.copy_(old)
