"""`LiveDelta`: a staged delta whose values change places with elements of live parameters, there and back."""

from __future__ import annotations

import torch

from weightlane.ckpt_engines import CommitError
from weightlane.sync import StagedDelta

from .commit_plan import CommitPlan

_PART = "delta commit"


class LiveDelta:
    """Where each changed element lives on this rank, found out beforehand, and its other value.

    Args:
        plan: Copies that are known to be right, and to be all that loading does.
        delta: What turns the live weights into a version.

    Raises:
        CommitError: A tensor of it does not go by copies, or a parameter has got other memory.
    """

    def __init__(self, plan: CommitPlan, delta: StagedDelta) -> None:
        if plan.moved():
            raise CommitError(
                "parameters have moved since it was learned where weights go.",
                part=_PART,
                hint="The next full version learns it anew.",
            )
        self.version = delta.version
        self._places: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        """Storage, offsets in it (int64), and the values that are not there now."""
        for segment, patch in delta.patches:
            spec = delta.manifest.specs[segment.tensor]
            positions, bits = patch.positions_and_values()
            values = bits.view(spec.dtype)
            for found in plan.locate(spec.name, positions + segment.start):
                self._places.append((found.storage, found.offsets, values[found.chosen].to(found.storage)))

    @torch.no_grad()
    def exchange(self) -> None:
        """Let all values change places; doing it again takes it back, bit for bit.

        Raises:
            CommitError: It failed, and what was exchanged already was taken back.
        """
        for count, _ in enumerate(self._places):
            try:
                self._exchange(count)
            except Exception as cause:
                for earlier in range(count):
                    self._exchange(earlier)
                raise CommitError(
                    f"version {self.version} could not be put into the weights: {type(cause).__name__}: {cause}.",
                    part=_PART,
                ) from cause

    def _exchange(self, number: int) -> None:
        storage, offsets, values = self._places[number]
        before = storage.index_select(0, offsets)
        storage.index_copy_(0, offsets, values)
        self._places[number] = (storage, offsets, before)
