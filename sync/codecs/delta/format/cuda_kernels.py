"""Comparing, compacting and flipping elements on a device, with Triton where it is installed, else with torch.

Finding changes takes two passes. The first counts the differing elements of each block, which tells where each block's part of
the result begins. The second writes the result. The count is enough to decide whether a delta can be short enough.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch

from weightlane.ckpt_engines.runtime.devices import runtime_of


@dataclass(frozen=True, slots=True)
class CountedChanges:
    """The number of differing elements of two segments on a device."""

    old: torch.Tensor
    """Integers of the element size, 1-D."""
    new: torch.Tensor
    ends: torch.Tensor | None
    """Running total of differing elements at the end of each program's block, int64; None without Triton."""
    total: int

    def compact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (int64, ascending) of the differing elements and their flips, old XOR new, on the device."""
        if self.ends is None:
            positions = torch.ne(self.old, self.new).nonzero().squeeze(1)
            return positions, self.old[positions] ^ self.new[positions]
        kernels = _kernels()
        assert kernels is not None
        positions = torch.empty(self.total, dtype=torch.int64, device=self.new.device)
        flips = torch.empty(self.total, dtype=self.new.dtype, device=self.new.device)
        if self.total:
            with runtime_of(
                self.new.device
            ).current():  # Triton launches on the current device, wherever its arguments are
                kernels.compact_kernel[(self.ends.numel(),)](
                    self.old, self.new, self.ends, positions, flips, self.new.numel(), BLOCK=kernels.BLOCK
                )
        return positions, flips


def count_changes(old: torch.Tensor, new: torch.Tensor) -> CountedChanges:
    """Count the elements in which two 1-D integer tensors of one size differ. Waits for the device."""
    kernels = _kernels()
    if kernels is None:
        return CountedChanges(old, new, None, int(torch.ne(old, new).sum()))
    programs = -(-new.numel() // kernels.BLOCK)
    counts = torch.empty(programs, dtype=torch.int32, device=new.device)
    if programs:
        with runtime_of(new.device).current():
            kernels.count_kernel[(programs,)](old, new, counts, new.numel(), BLOCK=kernels.BLOCK)
    ends = counts.cumsum(0, dtype=torch.int64)
    return CountedChanges(old, new, ends, int(ends[-1]) if programs else 0)


def flip(target: torch.Tensor, positions: torch.Tensor, flips: torch.Tensor) -> None:
    """Flip bits of the elements at `positions` (int32 or int64, each once) of `target`."""
    kernels = _kernels()
    if kernels is None:
        at = positions.long()
        target[at] = target[at] ^ flips
    elif positions.numel():
        with runtime_of(target.device).current():
            kernels.flip_kernel[(-(-positions.numel() // kernels.BLOCK),)](
                target, positions, flips, positions.numel(), BLOCK=kernels.BLOCK
            )


@cache
def _kernels() -> ModuleType | None:
    """The Triton programs, or None where Triton is not installed."""
    from . import triton_kernels  # noqa: PLC0415 - importing Triton takes a second, and few need it

    return triton_kernels if triton_kernels.AVAILABLE else None
