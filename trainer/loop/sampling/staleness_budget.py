"""`StalenessBudget`: bounds how far rollouts run ahead of the trainer."""

from __future__ import annotations


class StalenessBudget:
    """Admits groups so that none is too stale when it is trained on.

    With B groups per optimizer step, the n-th group (from 0) is trained on by step ``n // B``, whose parameters are version
    ``n // B``. Its tokens come from the committed version or a newer one. So a group may start while
    ``n // B - committed <= max_staleness``, that is while ``n < (committed + max_staleness + 1) * B``. This is the
    admission rule of AReaL (arXiv 2505.24298, equation 3) with the committed version in place of the trainer's, which makes
    the bound hold under slow syncs too.

    `version` serves at the start; every group of earlier steps counts as admitted.
    """

    def __init__(self, max_staleness: int, groups_per_step: int, version: int = 0) -> None:
        self._max_staleness = max_staleness
        self._groups_per_step = groups_per_step
        self.committed = version
        """The version every replica serves."""
        self._admitted = version * groups_per_step

    @property
    def room(self) -> int:
        """Number of groups that may start now."""
        return (self.committed + self._max_staleness + 1) * self._groups_per_step - self._admitted

    def admit(self) -> None:
        """Count a group that starts."""
        self._admitted += 1

    def give_back(self) -> None:
        """Take back the admission of a group that will not be trained on."""
        self._admitted -= 1

    def is_too_stale(self, step: int, oldest_version: int) -> bool:
        """Whether a group whose oldest token came from `oldest_version` may not train parameters of version `step`."""
        return step - oldest_version > self._max_staleness
