"""A decoded delta, which flips bits of a tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import ConfigError

from . import cuda_kernels
from .integer_views import INTEGERS, PART, integer_view

_CHUNK = 1 << 15
"""Elements flipped at once, so few that their copies and their positions widened to 64 bits stay in the cache."""


@dataclass(frozen=True, slots=True)
class BlockFlips:
    """The changes of one block of the segment."""

    base: int
    """The block's first element, from which positions count."""
    positions: torch.Tensor
    """int32, strictly ascending."""
    flips: torch.Tensor
    """Integers of the element size, one for each position: the bits in which the two versions differ."""


@dataclass(frozen=True, slots=True)
class Patch:
    """The decoded changes of one segment. Positions are proven to lie in the segment and to occur once."""

    elements: int
    """Elements of the segment."""
    itemsize: int
    """Bytes of an element."""
    blocks: tuple[BlockFlips, ...]
    """In their order."""

    @property
    def carried(self) -> int:
        """Number of changed elements."""
        return sum(block.flips.numel() for block in self.blocks)

    @property
    def nbytes(self) -> int:
        """Memory in bytes: the flips, and 4 bytes for the position of each."""
        return self.carried * (self.itemsize + 4)

    def to(self, device: torch.device | str) -> Patch:
        """The patch on another device."""
        blocks = [BlockFlips(each.base, each.positions.to(device), each.flips.to(device)) for each in self.blocks]
        return Patch(self.elements, self.itemsize, tuple(blocks))

    def positions_and_flips(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All changes as positions (int64, ascending, in the segment) and flips (integers of the element size)."""
        if not self.blocks:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=INTEGERS[self.itemsize])
        positions = torch.cat([block.positions.long().add_(block.base) for block in self.blocks])
        return positions, torch.cat([block.flips for block in self.blocks])

    def flip_(self, target: torch.Tensor) -> None:
        """Flip the bits of `target` in which the two versions differ. This turns one version into the other, in both directions.

        Args:
            target: The segment: contiguous, on the patch's device.

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
            for block in self.blocks:
                cuda_kernels.flip(flat[block.base :], block.positions, block.flips)
            return
        scratch = torch.empty(_CHUNK, dtype=torch.int64)
        for block in self.blocks:
            _flip_on_host(flat[block.base :], block, scratch)


def _flip_on_host(target: torch.Tensor, block: BlockFlips, scratch: torch.Tensor) -> None:
    for start in range(0, block.positions.numel(), _CHUNK):
        positions = block.positions[start : start + _CHUNK]
        at = scratch[: positions.numel()]
        at.copy_(positions)
        target.scatter_(0, at, target.index_select(0, at).bitwise_xor_(block.flips[start : start + _CHUNK]))
