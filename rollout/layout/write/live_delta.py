"""`LiveDelta`: a staged delta that can be put into live parameters, and taken back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import CommitError
from weightlane.ckpt_engines.runtime.host_copies import narrow_offsets, put_elements
from weightlane.sync import IncomingDelta
from weightlane.sync.version.box import positions_in

from .commit_plan import CommitPlan

_PART = "delta commit"
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where changed elements of one tensor live on this rank."""

    storage: torch.Tensor
    """All elements of the parameter's storage, as integers of their size."""
    offsets: torch.Tensor
    """int64, or int32 where `put_elements` takes that."""
    new: torch.Tensor
    old: torch.Tensor


class LiveDelta:
    """Everything that can be found out before the weights change: where each element lives, and what is there now.

    The live parameters must be the delta's base, and stay it until `exchange`.

    Args:
        plan: Copies that are known to be right, and to be all that loading does.
        delta: What turns the live weights into a version.
        renew_derived: Makes anew what layers derive from changed parameters.

    Raises:
        CommitError: A tensor of it does not go by copies, or a parameter has got other memory.
    """

    def __init__(self, plan: CommitPlan, delta: IncomingDelta, renew_derived: Callable[[], None]) -> None:
        self.version = delta.version
        self.base_version = delta.manifest.base_version
        self._plan, self._renew_derived = plan, renew_derived
        self._there = False
        """Whether the new values are in the parameters."""
        self.mixed = False
        """Whether an `exchange` failed and could not be taken back: the parameters hold some values of either version."""
        self.check()
        self._places: list[_Place] = []
        for segment, patch in delta.patches:
            part = delta.where(segment)
            spec = part.spec
            positions, bits = patch.positions_and_values()
            values = bits.view(spec.dtype)
            for found in plan.locate(spec.name, positions_in(spec.shape, part.box, positions)):
                integers = _INTEGERS[found.storage.itemsize]
                storage, new = found.storage.view(integers), values[found.chosen].to(found.storage).view(integers)
                old, offsets = storage.index_select(0, found.offsets), found.offsets
                if storage.is_cpu:
                    offsets = narrow_offsets(offsets, storage.numel())
                self._places.append(_Place(storage, offsets, new, old))

    def check(self) -> None:
        """Raise `CommitError` if a parameter has got other memory."""
        if self._plan.moved():
            raise CommitError(
                "parameters have moved since it was learned where weights go.",
                part=_PART,
                hint="The next full version learns it anew.",
            )

    @torch.no_grad()
    def exchange(self) -> None:
        """Put the new values where the old ones are; doing it again takes it back, bit for bit.

        Raises:
            CommitError: It failed, and what was written already was taken back.
            Exception: It failed, and so did taking it back; `mixed` says so.
        """
        done = 0
        try:
            for place in self._places:
                _write(place, place.old if self._there else place.new)
                done += 1
            self._renew_derived()
        except Exception as cause:
            self.mixed = True
            for place in self._places[: done + 1]:
                _write(place, place.new if self._there else place.old)
            self._renew_derived()
            self.mixed = False
            raise CommitError(
                f"version {self.version} could not be put into the weights: {type(cause).__name__}: {cause}.",
                part=_PART,
            ) from cause
        self._there = not self._there


def _write(place: _Place, values: torch.Tensor) -> None:
    if place.storage.is_cpu:
        put_elements(place.storage, place.offsets, values)
    else:
        place.storage.index_copy_(0, place.offsets, values)
