"""`LiveDelta`: a staged delta that can be written into live parameters and rolled back."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import CommitError, DeltaBaseError
from weightlane.ckpt_engines.runtime.tensor_bytes import narrow_offsets, put_elements
from weightlane.sync import IncomingDelta
from weightlane.sync.version.box import positions_in
from weightlane.sync.version.tensor_spec import TensorSpec

from .commit_plan import CommitPlan, as_integers

_PART = "delta commit"
_MOVED = "parameters have moved to other memory since the layout was traced."
_IN_FULL = "The coordinator has the version sent in full then."


@dataclass(frozen=True, slots=True)
class _ChangedElements:
    """Changed elements of one tensor on this rank."""

    storage: torch.Tensor
    """All elements of the parameter's storage, as integers of the element size."""
    offsets: torch.Tensor
    """Offsets in `storage`, int64, or int32 where `put_elements` takes that."""
    new: torch.Tensor
    old: torch.Tensor


class LiveDelta:
    """The live elements that a delta changes, located before the commit, with their new and old values.

    The live parameters must hold the delta's base version from now until `swap`.

    Args:
        plan: Copies that are proven to be all that loading does.
        delta: The delta.
        renew_derived: Recomputes the tensors that layers derive from changed parameters.
        left_out: Tensors that no rank reads.

    Raises:
        CommitError: A tensor of the delta does not go by copies.
        DeltaBaseError: A parameter has moved to other memory, or its values do not tell the bits that were sent.
    """

    def __init__(
        self,
        plan: CommitPlan,
        delta: IncomingDelta,
        renew_derived: Callable[[], None],
        left_out: Collection[str] = (),
    ) -> None:
        self.version = delta.version
        self.base_version = delta.manifest.base_version
        self._plan, self._renew_derived = plan, renew_derived
        self._written = False
        """Whether the parameters hold the new values."""
        self.mixed = False
        """Whether a failed `swap` could not be rolled back: the parameters hold values of both versions."""
        if plan.moved():
            raise DeltaBaseError(_MOVED, part=_PART, hint=_IN_FULL)
        self._changed: list[_ChangedElements] = []
        for segment, patch in delta.patches:
            part = delta.where(segment)
            spec = part.spec
            if spec.name in left_out:
                continue
            positions, flips = patch.positions.long(), patch.flips
            for found in plan.locate(spec.name, positions_in(spec.shape, part.box, positions)):
                storage, offsets = as_integers(found.storage), found.offsets
                old = storage.index_select(0, offsets)
                new = _flipped(old, flips.to(old.device)[found.chosen], spec, found.storage.dtype)
                if storage.is_cpu:
                    offsets = narrow_offsets(offsets, storage.numel())
                self._changed.append(_ChangedElements(storage, offsets, new, old))

    def check(self) -> None:
        """Raise `CommitError` if a parameter has moved to other memory."""
        if self._plan.moved():
            raise CommitError(_MOVED, part=_PART, hint="The next full version traces it again.")

    @torch.no_grad()
    def swap(self) -> None:
        """Replace the old values by the new ones. A second call rolls that back, bit for bit.

        Raises:
            CommitError: Writing failed, and was rolled back.
            Exception: Writing failed, and so did rolling back; `mixed` is set.
        """
        done = 0
        try:
            for elements in self._changed:
                _write(elements, elements.old if self._written else elements.new)
                done += 1
            self._renew_derived()
        except Exception as cause:
            self.mixed = True
            for elements in self._changed[: done + 1]:
                _write(elements, elements.new if self._written else elements.old)
            self._renew_derived()
            self.mixed = False
            raise CommitError(
                f"version {self.version} could not be written into the weights: {type(cause).__name__}: {cause}.",
                part=_PART,
            ) from cause
        self._written = not self._written


def _flipped(old: torch.Tensor, flips: torch.Tensor, spec: TensorSpec, live: torch.dtype) -> torch.Tensor:
    """The new bits of live elements, as integers. `CommitPlan.keeps_sent_bits` says that the old ones have what was sent."""
    if live == spec.dtype:
        return old ^ flips
    sent = old.view(live).to(spec.dtype)
    # A conversion may change the bits of a NaN, and may map two NaNs to one, which the way back cannot tell apart.
    if bool(sent.isnan().any()) or not torch.equal(as_integers(sent.to(live)), old):
        raise DeltaBaseError(
            f"{spec.name} holds values in {live} that do not tell the bits that were sent in {spec.dtype}.",
            part=_PART,
            hint=_IN_FULL,
        )
    return as_integers((as_integers(sent) ^ flips).view(spec.dtype).to(live))


def _write(elements: _ChangedElements, values: torch.Tensor) -> None:
    if elements.storage.is_cpu:
        put_elements(elements.storage, elements.offsets, values)
    else:
        elements.storage.index_copy_(0, elements.offsets, values)
