"""`MessageQueue`: the coordinator's inbox, the messages kept from the current session, and the inboxes of all participants."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from contextlib import suppress

from weightlane.ckpt_engines import ClosedError, Deadline, DeadlineExceededError, WeightlaneError, error_from_wire

from ..messages import COORDINATOR, Failed, Hello, Joined, Left, Lost, Message, Offer, Ready, Reset, Staged, Stop
from ..rendezvous import Rendezvous
from .roster import Roster

_log = logging.getLogger(__name__)


class MessageQueue:
    """Sends messages to the participants of a run and receives theirs.

    One thread at a time may use it. `post_to_self`, `interrupt` and `close` may be called from any thread.

    Args:
        rendezvous: The hosted rendezvous.
        roster: Kept up to date with the participants that join, leave, die and answer.
    """

    def __init__(self, rendezvous: Rendezvous, roster: Roster) -> None:
        self._rendezvous = rendezvous
        self._inbox = rendezvous.inbox(COORDINATOR)
        self._roster = roster
        self.session = ""
        """The current session; replies of any other one are dropped."""
        self.offers: dict[int, Offer] = {}
        """Offers of this session by version; publishers also offer versions whose sync has not begun."""
        self.hellos: dict[str, Hello] = {}
        """Answers to this session's `Reset` by participant."""
        self.early: dict[tuple[type[Message], str, int], Ready | Staged] = {}
        """Replies of fast subscribers that arrived before they were waited for, by kind, subscriber and version."""
        self.publisher_failures: dict[tuple[int, str], Failed] = {}
        """Failures to offer or send a version in this session, by version and publisher."""
        self.gone: dict[str, Left | Joined] = {}
        """Participants that left or restarted after they were invited, and so are not in this session."""
        self.interruption: WeightlaneError | None = None
        """The error that `next` raises instead of waiting."""
        self.closed = False

    def start_session(self, session: str, names: Iterable[str]) -> None:
        """End the current session, drop its values in mailboxes, and invite `names` to the new session."""
        self._rendezvous.forget_session(self.session)
        self.session = session
        for heard in (self.offers, self.hellos, self.early, self.publisher_failures):
            heard.clear()
        self.invite(names)

    def invite(self, names: Iterable[str]) -> None:
        """Send participants a `Reset` to the session; each answers with a `Hello`."""
        names = list(names)
        for name in names:
            self.hellos.pop(name, None)
            self.gone.pop(name, None)
        self.post_all(names, Reset(session=self.session))

    def post_all(self, names: Iterable[str], message: Message) -> None:
        """Send a message to those of the participants `names` that have joined."""
        inboxes = self._roster.inboxes
        self._rendezvous.post_all([inbox for name in names if (inbox := inboxes.get(name)) is not None], message)

    def post_to_self(self, message: Message) -> None:
        """Append a message to the coordinator's own inbox. From any thread; does nothing if the rendezvous is closed."""
        with suppress(WeightlaneError):
            self._rendezvous.post(COORDINATOR, message)

    def wait_until_left(self, names: Iterable[str], deadline: Deadline) -> list[str]:
        """Wait until `names` have read the `Stop` of `close` and left. Returns those that have not by `deadline`."""
        inboxes = {inbox: name for name in names if (inbox := self._roster.inboxes.get(name)) is not None}
        return [inboxes[inbox] for inbox in self._rendezvous.wait_until_unread(inboxes, deadline)]

    def catch_up(self) -> None:
        """Process every message that has arrived. Raises `ClosedError` if the coordinator was closed."""
        while (message := self._inbox.get_nowait()) is not None:
            self._note(message)

    def receive(self, deadline: Deadline) -> Message | None:
        """Wait for the next message and process it; None if none arrives by `deadline`."""
        try:
            message = self._inbox.get(deadline)
        except DeadlineExceededError:
            return None
        self._note(message)
        return message

    def next(self, deadline: Deadline, names: Collection[str], what: str) -> Message:
        """Wait for the next message and process it. Raises `DeadlineExceededError` naming `names`, or the interruption."""
        self._check_interruption()
        message = self.receive(deadline)
        if message is None:
            named = ", ".join(sorted(names))
            raise deadline.error(f"{named} {what}", part=COORDINATOR, peer=named)
        self._check_interruption()
        return message

    def wait_for_joined(self, names: Iterable[str], deadline: Deadline) -> None:
        """Wait until all of `names` have joined. Raises `DeadlineExceededError` naming those that have not."""
        while missing := set(names) - self._roster.inboxes.keys():
            self.next(deadline, missing, "to join")

    def interrupt(self, error: WeightlaneError) -> None:
        """Make `next`, which waits on another thread, raise `error`."""
        self.interruption = error
        self.post_to_self(Lost(replica="", error=error.to_wire()))

    def close(self) -> None:
        """Stop every participant's control thread, and make the next read raise `ClosedError`. From any thread."""
        self.closed = True
        try:
            self.post_all(self._roster.participants(), Stop())
            self._rendezvous.post(COORDINATOR, Stop())
        except WeightlaneError:
            _log.debug("the rendezvous was closed before the coordinator")

    @property
    def warning_level(self) -> int:
        """The log level of warnings; lower after `close`, when aborted versions are expected."""
        return logging.DEBUG if self.closed else logging.WARNING

    def _check_interruption(self) -> None:
        if self.interruption is not None:
            raise self.interruption

    def _note(self, message: Message) -> None:
        if isinstance(message, Stop):
            raise ClosedError("the coordinator was closed.", part=COORDINATOR)
        if isinstance(message, Joined | Left):
            note = self._roster.note_joined if isinstance(message, Joined) else self._roster.note_left
            if note(message.name, message.inbox):
                self.gone[message.name] = message
                self.hellos.pop(message.name, None)
        elif isinstance(message, Lost):
            if entry := self._roster.entries.get(message.replica):
                self._roster.mark_lost(entry, error_from_wire(message.error))
        else:
            self._roster.note_answer(getattr(message, "name", ""))
            if getattr(message, "session", None) == self.session:
                self._keep(message)

    def _keep(self, message: Message) -> None:
        """Keep a message of this session that may arrive before it is waited for."""
        if isinstance(message, Offer):
            self.offers[message.version] = message
            self.publisher_failures.pop((message.version, message.name), None)  # it was published again
        elif isinstance(message, Failed) and message.name in self._roster.publishers:
            self.publisher_failures[message.version, message.name] = message
        elif isinstance(message, Hello):
            self.hellos[message.name] = message
        elif isinstance(message, Ready | Staged):
            self.early[type(message), message.name, message.version] = message
