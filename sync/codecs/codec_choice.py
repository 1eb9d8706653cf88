"""The choice of a version's codec: as configured, or with `auto` by the share of elements that the version before changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..config import CodecPolicy
from ..version.manifest import CODEC_DELTA, CODEC_DENSE

DELTA_BELOW = 0.03
"""With `auto`, versions become deltas when the version before changed a smaller share of all elements. Encoding and decoding then
take less time than sending the rest over 4 Gbit/s."""
DENSE_ABOVE = 0.04
"""With `auto`, once versions are deltas they stay deltas below this share, so that small variations do not change the codec."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The codec of a version, and the reason for it."""

    codec: str
    reason: str


@dataclass(frozen=True, slots=True)
class RankChange:
    """How many elements the version before has changed on one trainer rank, among the compared ones."""

    changed: int
    compared: int
    elements: int
    """Elements that the rank sends of a version."""
    sparse: bool
    """Whether the rank's last versions changed few elements; see `CodecChooser.by_density`."""


class CodecChooser:
    """Chooses the codec of each version of one trainer rank."""

    def __init__(self, policy: CodecPolicy, full_every: int) -> None:
        self._policy = policy
        self._full_every = full_every
        # Versions sent since the last dense one.
        self._deltas = 0
        self._sparse = False
        self._counted: tuple[int, int] | None = None

    @property
    def asks_density(self) -> bool:
        """Whether ranks must agree by `by_density` before a version is a delta."""
        return self._policy == "auto"

    def choose(self, *, has_base: bool) -> Choice:
        """Choose the codec of the next version. With `auto` a delta is subject to `by_density`."""
        if not has_base:
            return Choice(CODEC_DENSE, "the receivers have no version that a delta could apply to")
        if self._deltas + 1 >= self._full_every:
            return Choice(CODEC_DENSE, f"every {self._full_every} versions one is sent in full")
        return Choice(CODEC_DELTA, "asked for")

    def sent(self, codec: str) -> None:
        """Note that a version was sent."""
        self._deltas = self._deltas + 1 if codec == CODEC_DELTA else 0

    def note_change(self, changed: int, compared: int) -> None:
        """Note how many elements the version that was sent last has changed, of those that were compared."""
        self._counted = changed, compared

    def change(self, elements: int) -> RankChange | None:
        """This rank's counts for the other ranks, if it sends `elements` of a version; None if nothing was compared yet."""
        return None if self._counted is None else RankChange(*self._counted, elements, self._sparse)

    def by_density(self, changes: Sequence[RankChange | None]) -> Choice:
        """Choose by the counts of all trainer ranks for the version before. All ranks get the same result.

        If one rank's counts are None, because it cannot send a delta or has compared nothing yet, the version is dense.
        """
        known = [each for each in changes if each is not None]
        elements = sum(each.elements for each in known)
        if len(known) < len(changes) or not elements:
            return Choice(CODEC_DENSE, "not every trainer rank knows yet how much a version changes")
        share = sum(each.elements * each.changed / max(each.compared, 1) for each in known) / elements
        limit = DENSE_ABOVE if all(each.sparse for each in known) else DELTA_BELOW
        self._sparse = share < limit
        reason = f"{share:.2%} changed in the version before, and deltas are sent below {limit:.0%}"
        return Choice(CODEC_DELTA if self._sparse else CODEC_DENSE, reason)
