"""`RankAgreement`: the trainer ranks of a session exchange values of each version through the run's hub.

Each rank publishes one value per topic and version, and a rank that needs the values collects them all in one reply. So a rank
needs two messages, however many ranks there are.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from weightlane.ckpt_engines import ClosedError, Deadline, ProtocolError, WeightlaneError

from ...control.hub.client import PendingReply
from ...control.hub.frames import from_bytes
from ...control.hub.mailboxes import gathered
from ...control.rendezvous import Mailbox

_REMEMBERED = 2
"""Number of newest versions whose values stay at the hub: other ranks may still be sending the version before."""


class Interrupt:
    """Ends the waits of other threads for replies of the hub, permanently. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waits: dict[PendingReply, WeightlaneError] = {}
        self.is_set = False

    def set(self) -> None:
        """Make every present and future wait inside `ends` raise its error."""
        with self._lock:
            self.is_set = True
            waits = list(self._waits.items())
        for reply, error in waits:
            reply.give_up(error)

    @contextmanager
    def ends(self, reply: PendingReply, error: WeightlaneError) -> Iterator[None]:
        """Context in which `set` makes the wait for `reply` raise `error`."""
        with self._lock:
            self._waits[reply] = error
        try:
            if self.is_set:
                reply.give_up(error)
            yield
        finally:
            with self._lock:
                del self._waits[reply]


class RankAgreement:
    """Exchanges values of all trainer ranks of one session, by topic and version.

    Args:
        mailbox: A mailbox that only this session uses.
        names: The ranks' publishers, in rank order.
        rank: This rank.
    """

    def __init__(self, mailbox: Mailbox, names: Sequence[str], rank: int) -> None:
        self._mailbox = mailbox
        self._names = list(names)
        self._rank = rank
        self._said: dict[str, list[int]] = defaultdict(list)
        """The versions with values at the hub, by topic, oldest first."""
        self._session_over = Interrupt()

    def close(self) -> None:
        """End the session: every wait in `collect` raises `ClosedError`. Idempotent."""
        self._session_over.set()

    def publish(self, topic: str, version: int, value: Any) -> None:
        """Publish this rank's JSON-representable `value` for a version."""
        mailbox, name, published = self._mailbox.within(topic), self._names[self._rank], self._said[topic]
        mailbox.within(str(version)).put(name, value)
        published[:] = [other for other in published if other != version] + [version]
        while len(published) > _REMEMBERED:
            mailbox.within(str(published.pop(0))).delete(name)

    def collect(self, topic: str, version: int, deadline: Deadline, superseded: Interrupt) -> dict[str, Any]:
        """Wait for the values of all ranks. Returns them by publisher, in rank order.

        Raises `DeadlineExceededError` naming the ranks without a value. Raises `ClosedError` as soon as the session is over or
        the version `superseded`, because a rank that already publishes a newer version publishes no value for this one.
        """
        reply = self._mailbox.within(topic).within(str(version)).gather(len(self._names))
        error = ClosedError(f"the ranks need not agree on {topic} any more.", part=topic)
        with self._session_over.ends(reply, error), superseded.ends(reply, error):
            content = reply.result(deadline)
        if content is None:
            silent = sorted(set(self._names).difference(reply.present()))
            raise deadline.error(f"the {topic} of version {version}", part=topic, peer=", ".join(silent))
        published = gathered(content)
        if strangers := set(published) - set(self._names):
            raise ProtocolError(
                f"participants that are no trainer ranks speak of it: {', '.join(sorted(strangers))}.",
                part=topic,
                hint="Give every participant of a run a name of its own.",
            )
        return {name: from_bytes(published[name], f"the {topic} of {name}") for name in self._names}
