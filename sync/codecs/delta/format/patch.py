"""A received delta, ready to be put into a tensor, and to be taken back."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import ConfigError

from . import cuda_kernels
from .raw import INTEGERS, PART, integer_view
from .wire_format import FRAME

_CHUNK = 1 << 15
"""Positions handled at once: what is widened to 64 bits stays in the cache."""


@dataclass(frozen=True, slots=True)
class ScatteredValues:
    """New values for single elements of a frame of the segment."""

    base: int
    """Element that positions are relative to: the frame's first."""
    positions: torch.Tensor
    """int32, strictly ascending."""
    values: torch.Tensor
    """Integers of the element size, one for each position."""


@dataclass(frozen=True, slots=True)
class ContiguousValues:
    """New values for a whole stretch inside a frame."""

    base: int
    """First element."""
    values: torch.Tensor
    """Integers of the element size."""


@dataclass(frozen=True, slots=True)
class Patch:
    """The changes of one segment, decoded and proven valid: positions ascend inside the segment, each occurs once."""

    elements: int
    """Elements of the segment."""
    itemsize: int
    """Bytes of an element."""
    scattered: tuple[ScatteredValues, ...]
    contiguous: tuple[ContiguousValues, ...]

    @property
    def carried(self) -> int:
        """Number of values."""
        return sum(values.numel() for values in self._values())

    @property
    def nbytes(self) -> int:
        """Memory held, in bytes: the values, and 4 bytes for each that is scattered."""
        return self.carried * self.itemsize + 4 * sum(run.positions.numel() for run in self.scattered)

    def to(self, device: torch.device | str) -> Patch:
        """The same on another device."""
        scattered = [
            ScatteredValues(run.base, run.positions.to(device), run.values.to(device)) for run in self.scattered
        ]
        contiguous = [ContiguousValues(run.base, run.values.to(device)) for run in self.contiguous]
        return Patch(self.elements, self.itemsize, tuple(scattered), tuple(contiguous))

    def positions_and_values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Positions (int64, ascending, in the segment) and the new values there (integers of the element size).

        The values may be the patch's own memory, which `swap_` changes.
        """
        frames: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for run in self.scattered:
            frames.setdefault(run.base // FRAME, []).append((run.positions.long().add_(run.base), run.values))
        for stretch in self.contiguous:
            where = torch.arange(stretch.base, stretch.base + stretch.values.numel(), device=stretch.values.device)
            frames.setdefault(stretch.base // FRAME, []).append((where, stretch.values))
        if not frames:
            return torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=INTEGERS[self.itemsize])
        # Sorting takes ten times as long as all the rest: only frames whose runs may interleave are sorted.
        ordered = [_in_order(runs) for _, runs in sorted(frames.items(), key=lambda frame: frame[0])]
        return _joined([positions for positions, _ in ordered]), _joined([values for _, values in ordered])

    def _values(self) -> list[torch.Tensor]:
        return [*(run.values for run in self.scattered), *(run.values for run in self.contiguous)]

    def apply_(self, target: torch.Tensor) -> None:
        """Write the new values into `target`, the segment's base: contiguous, on the patch's device.

        Raises:
            ConfigError: `target` has another number of elements, element size or layout.
        """
        self._exchange(target, keep_old=False)

    def swap_(self, target: torch.Tensor) -> None:
        """Write the new values into `target` and keep the old ones here, so that doing it again restores them.

        Raises:
            ConfigError: As `apply_`.
        """
        self._exchange(target, keep_old=True)

    def _exchange(self, target: torch.Tensor, *, keep_old: bool) -> None:
        if (target.numel(), target.itemsize) != (self.elements, self.itemsize):
            raise ConfigError(
                f"a patch for {self.elements} elements of {self.itemsize} bytes was to be put into {target.numel()} of "
                f"{target.itemsize}.",
                part=PART,
                hint="Apply it to the segment it was made for.",
            )
        flat = integer_view(target)
        for stretch in self.contiguous:
            _exchange_contiguous(flat[stretch.base : stretch.base + stretch.values.numel()], stretch.values, keep_old)
        if flat.device.type != "cpu":
            for run in self.scattered:
                cuda_kernels.scatter(flat[run.base :], run.positions, run.values, keep_old=keep_old)
            return
        scratch = torch.empty(_CHUNK, dtype=torch.int64)
        for run in self.scattered:
            _scatter(flat[run.base :], run, scratch, keep_old)


def _in_order(runs: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and values of all `runs`, each of which ascends."""
    if len(runs) == 1:
        return runs[0]
    positions, order = torch.cat([positions for positions, _ in runs]).sort()
    return positions, torch.cat([values for _, values in runs])[order]


def _joined(pieces: list[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _exchange_contiguous(target: torch.Tensor, values: torch.Tensor, keep_old: bool) -> None:
    if not keep_old:
        target.copy_(values)
        return
    for start in range(0, values.numel(), _CHUNK):
        mine, theirs = values[start : start + _CHUNK], target[start : start + _CHUNK]
        old = theirs.clone()
        theirs.copy_(mine)
        mine.copy_(old)


def _scatter(target: torch.Tensor, run: ScatteredValues, scratch: torch.Tensor, keep_old: bool) -> None:
    for start in range(0, run.positions.numel(), _CHUNK):
        part = run.positions[start : start + _CHUNK]
        at = scratch[: part.numel()]
        at.copy_(part)
        mine = run.values[start : start + _CHUNK]
        old = target.index_select(0, at) if keep_old else None
        target.scatter_(0, at, mine)
        if old is not None:
            mine.copy_(old)


def update_base_(base: torch.Tensor, new: torch.Tensor) -> None:
    """Make `base` the bits of `new`: what a sender does once everybody has the version.

    Cheaper, where there are two buffers, is to let them change roles.

    Raises:
        ConfigError: They differ in size.
    """
    target, source = integer_view(base), integer_view(new)
    if target.numel() != source.numel() or target.dtype != source.dtype:
        raise ConfigError(f"a base of {base.numel()} elements cannot become {new.numel()} others.", part=PART)
    target.copy_(source)
