"""What the trainer ranks of a session tell each other of each version: plain data, in the store where the run meets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from weightlane.ckpt_engines import ClosedError, Deadline

_LOOK_S = 0.002
"""Between two looks for what another rank has to say."""
_REMEMBERED = 2
"""How many of its newest versions a rank leaves in the store: others may still be sending the one before."""


class Board(Protocol):
    """Where the ranks say what they have: a mailbox that can be looked into, and can forget."""

    def put(self, key: str, value: Any) -> None:
        """As `StoreMailbox.put`."""

    def get(self, key: str, deadline: Deadline) -> Any:
        """As `StoreMailbox.get`."""

    def has(self, key: str) -> bool:
        """Whether `get` would find `key` now."""

    def delete(self, key: str) -> None:
        """Forget `key`."""


class RankTalk:
    """Of one session, about one thing.

    Args:
        board: Private to the session and the thing.
        names: The ranks' publishers, in rank order.
        rank: This rank.
        about: The thing, for errors.
    """

    def __init__(self, board: Board, names: Sequence[str], rank: int, about: str) -> None:
        self._board = board
        self._names = list(names)
        self._rank = rank
        self._about = about
        self._said: list[int] = []
        self._closed = threading.Event()

    def close(self) -> None:
        """The session is over: whoever waits need not any more. Idempotent."""
        self._closed.set()

    def say(self, version: int, mine: Any) -> None:
        """What this rank has to say of a version."""
        self._board.put(_key(version, self._names[self._rank]), mine)
        self._said = [other for other in self._said if other != version] + [version]
        while len(self._said) > _REMEMBERED:
            self._board.delete(_key(self._said.pop(0), self._names[self._rank]))

    def hear(self, version: int, deadline: Deadline, wanted: Callable[[], bool] = lambda: True) -> Iterator[Any]:
        """What each rank says of it, in rank order.

        Raises `DeadlineExceededError` when a rank says nothing, or `ClosedError` as soon as the session is over or the version
        not `wanted` any more: a rank that has gone on to a newer one says nothing of it.
        """
        for name in self._names:
            key = _key(version, name)
            while not self._board.has(key):
                if self._closed.wait(_LOOK_S) or not wanted():
                    raise ClosedError(f"the ranks need not agree on {self._about} any more.", part=self._about)
                deadline.check(f"what it has of {self._about}", part=self._about, peer=name)
            yield self._board.get(key, deadline)


def _key(version: int, name: str) -> str:
    return f"{version}/{name}"
