"""How several trainer ranks agree on a delta: each says what it has to send, and whoever needs the whole reads all.

Rank 0 reads it for the manifest; another rank, when it is to give its pieces, so that it knows where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from weightlane.ckpt_engines import Deadline

from ...codecs.delta.encoding import segments_from_plain, segments_to_plain
from ...version.manifest import DeltaSegment
from ..publication import Publication
from .rank_agreement import AgreementMailbox, RankAgreement


class DeltaAgreement:
    """Of one session.

    Args:
        board: Private to the session.
        names: The ranks' publishers, in rank order.
        rank: This rank.
    """

    def __init__(self, board: AgreementMailbox, names: Sequence[str], rank: int) -> None:
        self._talk = RankAgreement(board, names, rank, "a delta")

    def close(self) -> None:
        """The session is over: whoever waits need not any more. Idempotent."""
        self._talk.close()

    def look_again(self) -> None:
        """As `RankAgreement.look_again`."""
        self._talk.look_again()

    def say(self, held: Publication) -> None:
        """What this rank has of `held`: its segments and the version they apply to, or nothing if it has no delta."""
        mine = None
        if held.is_delta and held.delta is not None and held.base is not None:
            mine = [held.base.version, segments_to_plain(held.delta.segments)]
        self._talk.say(held.version, mine)

    def hear(
        self, held: Publication, deadline: Deadline, wanted: Callable[[], bool] = lambda: True
    ) -> list[tuple[DeltaSegment, ...]]:
        """The segments of every rank, in rank order; none at all unless every rank has a delta to the same version.

        Raises `DeadlineExceededError` when a rank says nothing, or `ClosedError` as soon as the session is over or the version
        not `wanted` any more: a rank that has gone on to a newer one says nothing of it.
        """
        base = held.base.version if held.base is not None else -1
        segments: list[tuple[DeltaSegment, ...]] = []
        for said in self._talk.hear(held.version, deadline, wanted):
            if not isinstance(said, list) or len(said) != 2 or said[0] != base:  # noqa: PLR2004 - version and segments
                return []
            segments.append(segments_from_plain(said[1]))
        return segments
