"""What the trainer ranks of a session tell each other of each version: plain data, through the hub where the run meets.

Each rank says one thing of a version, and whoever needs to know waits for all of it at once: two messages per rank, however many
there are.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from weightlane.ckpt_engines import ClosedError, Deadline, ProtocolError

from ...control.hub.client import PendingReply
from ...control.hub.hub import gathered
from ...control.hub.plain_bytes import from_bytes

_REMEMBERED = 2
"""How many of its newest versions a rank leaves at the hub: others may still be sending the one before."""


class AgreementMailbox(Protocol):
    """Where the ranks say what they have; `weightlane.sync.control.rendezvous.Mailbox` is one."""

    def within(self, part: str) -> AgreementMailbox:
        """The board of a part of this one."""

    def put(self, key: str, value: Any) -> None:
        """As `Mailbox.put`."""

    def delete(self, key: str) -> None:
        """Forget `key`."""

    def gather(self, count: int) -> PendingReply:
        """As `weightlane.sync.control.rendezvous.Mailbox.gather`."""


class RankAgreement:
    """What the ranks of one session tell each other about one thing.

    Args:
        board: Private to the session and the thing.
        names: The ranks' publishers, in rank order.
        rank: This rank.
        about: The thing, for errors.
    """

    def __init__(self, board: AgreementMailbox, names: Sequence[str], rank: int, about: str) -> None:
        self._board = board
        self._names = list(names)
        self._rank = rank
        self._about = about
        self._said: list[int] = []
        self._closed = False
        self._hearing: dict[PendingReply, Callable[[], bool]] = {}
        """What is waited for, and whether it still is wanted."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """The session is over: whoever waits need not any more. Idempotent."""
        self._closed = True
        self.look_again()

    def look_again(self) -> None:
        """Let those who wait in `hear` go whose version is not wanted any more."""
        with self._lock:
            unwanted = [asked for asked, wanted in self._hearing.items() if self._closed or not wanted()]
        for asked in unwanted:
            asked.give_up(ClosedError(f"the ranks need not agree on {self._about} any more.", part=self._about))

    def say(self, version: int, mine: Any) -> None:
        """What this rank has to say of a version."""
        name = self._names[self._rank]
        self._board.within(str(version)).put(name, mine)
        self._said = [other for other in self._said if other != version] + [version]
        while len(self._said) > _REMEMBERED:
            self._board.within(str(self._said.pop(0))).delete(name)

    def hear(self, version: int, deadline: Deadline, wanted: Callable[[], bool] = lambda: True) -> list[Any]:
        """What each rank says of it, in rank order.

        Raises `DeadlineExceededError` when a rank says nothing, or `ClosedError` as soon as the session is over or the version
        not `wanted` any more, which `look_again` asks: a rank that has gone on to a newer one says nothing of it.
        """
        asked = self._board.within(str(version)).gather(len(self._names))
        with self._lock:
            self._hearing[asked] = wanted
        try:
            self.look_again()  # it may have changed before
            value = asked.result(deadline)
        finally:
            with self._lock:
                del self._hearing[asked]
        if value is None:
            silent = sorted(set(self._names).difference(asked.present()))
            raise deadline.error(f"what it has of {self._about}", part=self._about, peer=", ".join(silent))
        said = gathered(value)
        if strangers := set(said) ^ set(self._names):
            raise ProtocolError(
                f"others than the trainer ranks speak of it: {', '.join(sorted(strangers))}.",
                part=self._about,
                hint="Give every participant of a run a name of its own.",
            )
        return [from_bytes(said[name], f"what {name} says of {self._about}") for name in self._names]
