"""How several trainer ranks agree on a delta: each says what it has to send, and whoever needs the whole reads all.

Rank 0 reads it for the manifest; another rank, when it is to give its pieces, so that it knows where they belong.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from weightlane.ckpt_engines import ClosedError, Deadline, ProtocolError

from .delta_encoding import delta_manifest, delta_tables, segments_from_plain, segments_to_plain
from .gather import GatherPlan
from .manifest import Manifest, Segment
from .publication import Publication

_PART = "delta agreement"
_LOOK_S = 0.002
"""Between two looks for what another rank has to say."""
_REMEMBERED = 2
"""How many of its newest versions a rank leaves in the store: others may still be sending the one before."""


class Board(Protocol):
    """Where the ranks say what they have: a mailbox that can be looked into, and can forget."""

    def put(self, key: str, value: Any) -> None:
        """As `Mailbox.put`."""

    def get(self, key: str, deadline: Deadline) -> Any:
        """As `Mailbox.get`."""

    def has(self, key: str) -> bool:
        """Whether `get` would find `key` now."""

    def delete(self, key: str) -> None:
        """Forget `key`."""


class DeltaAgreement:
    """Of one session.

    Args:
        board: Private to the session.
        names: The ranks' publishers, in rank order.
        rank: This rank.
    """

    def __init__(self, board: Board, names: Sequence[str], rank: int) -> None:
        self._board = board
        self._names = list(names)
        self._rank = rank
        self._said: list[int] = []
        self._closed = threading.Event()

    def close(self) -> None:
        """The session is over: whoever waits need not any more. Idempotent."""
        self._closed.set()

    def say(self, held: Publication) -> None:
        """What this rank has of `held`: its segments and the version they apply to, or nothing if it has no delta."""
        mine = None
        if held.is_delta and held.delta is not None and held.base is not None:
            mine = [held.base.version, segments_to_plain(held.delta.segments)]
        self._board.put(_key(held.version, self._names[self._rank]), mine)
        self._said = [version for version in self._said if version != held.version] + [held.version]
        while len(self._said) > _REMEMBERED:
            self._board.delete(_key(self._said.pop(0), self._names[self._rank]))

    def hear(
        self, held: Publication, deadline: Deadline, wanted: Callable[[], bool] = lambda: True
    ) -> list[tuple[Segment, ...]]:
        """The segments of every rank, in rank order; none at all unless every rank has a delta to the same version.

        Raises `DeadlineExceededError` when a rank says nothing, or `ClosedError` as soon as the session is over or the version
        not `wanted` any more: a rank that has gone on to a newer one says nothing of it.
        """
        base = held.base.version if held.base is not None else -1
        segments: list[tuple[Segment, ...]] = []
        for name in self._names:
            self._wait_for(_key(held.version, name), name, deadline, wanted)
            said = self._board.get(_key(held.version, name), deadline)
            if not isinstance(said, list) or len(said) != 2 or said[0] != base:  # noqa: PLR2004 - version and segments
                return []
            segments.append(segments_from_plain(said[1]))
        return segments

    def _wait_for(self, key: str, name: str, deadline: Deadline, wanted: Callable[[], bool]) -> None:
        while not self._board.has(key):
            if self._closed.wait(_LOOK_S) or not wanted():
                raise ClosedError("the ranks need not agree on a delta any more.", part=_PART)
            deadline.check("what it has of a delta", part=_PART, peer=name)

    def plan(self, layout: Manifest, held: Publication, deadline: Deadline) -> GatherPlan:
        """Who sends which of the delta's bytes. `ProtocolError` when the ranks have none."""
        segments = self.hear(held, deadline)
        if not segments or held.base is None:
            raise ProtocolError(f"the ranks have no delta of version {held.version}.", part=_PART)
        base = (held.base.version, held.base.identity)
        manifest = delta_manifest(layout, held.version, base, held.identity, segments)
        return GatherPlan(manifest, dict(zip(self._names, delta_tables(segments), strict=True)))


def _key(version: int, name: str) -> str:
    return f"{version}/{name}"
