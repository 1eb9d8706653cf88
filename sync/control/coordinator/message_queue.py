"""`MessageQueue`: the coordinator's messages to the participants and theirs to it, and its waits for their replies."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import TypeGuard, TypeVar

from weightlane.ckpt_engines import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    WeightlaneError,
    WorkerDiedError,
    error_from_wire,
)

from ..messages import (
    COORDINATOR,
    Accepted,
    Connected,
    Failed,
    Hello,
    Joined,
    Left,
    Lost,
    Message,
    Offer,
    Ready,
    Reset,
    Sent,
    Staged,
    Stop,
)
from ..rendezvous import Rendezvous
from .blame import AttemptError, blame
from .replicas import ReplicaState, Roster, RosterEntry

_FURTHER_FAILURES_S = 0.1
"""Seconds to wait for further failures after the first: the participant that knows the culprit may not report first."""
Reply = Hello | Connected | Offer | Accepted | Ready | Sent | Staged
M = TypeVar("M", Hello, Connected, Offer, Accepted, Ready, Sent, Staged)


class MessageQueue:
    """Sends messages to the participants of a run, receives theirs, and waits for the replies of the current session.

    One thread at a time may use it. `post_to_self`, `interrupt` and `close` may be called from any thread.

    Args:
        rendezvous: The hosted rendezvous.
        roster: Kept up to date with the participants that join, leave, die and answer.
    """

    def __init__(self, rendezvous: Rendezvous, roster: Roster) -> None:
        self._rendezvous = rendezvous
        rendezvous.listen(COORDINATOR)
        self._roster = roster
        self.session = ""
        """The current session; replies of any other one are dropped."""
        self.offers: dict[int, Offer] = {}
        """Offers of this session by version; publishers also offer versions whose sync has not begun."""
        self.hellos: dict[str, Hello] = {}
        """Answers to this session's `Reset` by participant."""
        self._early: dict[tuple[type[Message], str, int], Ready | Staged] = {}
        """Replies of fast subscribers that arrived before they were waited for, by kind, subscriber and version."""
        self._publisher_failures: dict[tuple[int, str], Failed] = {}
        """Failures to offer or send a version in this session, by version and publisher."""
        self.gone: dict[str, Left | Joined] = {}
        """Participants that left or restarted after they were invited, and so are not in this session."""
        self.interruption: WeightlaneError | None = None
        """The error that a wait raises instead of waiting."""
        self.closed = False

    # -- sending ------------------------------------------------------------------------------------------------------------

    def start_session(self, session: str, names: Iterable[str]) -> None:
        """End the current session, drop its values in mailboxes, and invite `names` to the new session."""
        self._rendezvous.forget_session(self.session)
        self.session = session
        for heard in (self.offers, self.hellos, self._early, self._publisher_failures):
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
        """Append a message to the coordinator's own inbox. From any thread."""
        self._rendezvous.post(COORDINATOR, message)

    def interrupt(self, error: WeightlaneError) -> None:
        """Make a wait on another thread raise `error`."""
        self.interruption = error
        self.post_to_self(Lost(replica="", error=error.to_wire()))

    def close(self) -> None:
        """Stop every participant's control thread, and make the next read raise `ClosedError`. From any thread."""
        self.closed = True
        self.post_all(self._roster.participants(), Stop())
        self.post_to_self(Stop())

    def wait_until_left(self, names: Iterable[str], deadline: Deadline) -> list[str]:
        """Wait until `names` have read the `Stop` of `close` and left. Returns those that have not by `deadline`."""
        inboxes = {inbox: name for name in names if (inbox := self._roster.inboxes.get(name)) is not None}
        return [inboxes[inbox] for inbox in self._rendezvous.wait_until_unread(inboxes, deadline)]

    @property
    def warning_level(self) -> int:
        """The log level of warnings; lower after `close`, when aborted versions are expected."""
        return logging.DEBUG if self.closed else logging.WARNING

    # -- receiving ----------------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Process every message that has arrived. Raises `ClosedError` if the coordinator was closed."""
        while self._receive(Deadline.after(0.0)) is not None:
            pass

    def wait_for_joined(self, names: Iterable[str], deadline: Deadline) -> None:
        """Wait until all of `names` have joined. Raises `DeadlineExceededError` naming those that have not."""
        while missing := set(names) - self._roster.inboxes.keys():
            self._next(deadline, missing, "to join")

    def _receive(self, deadline: Deadline) -> Message | None:
        """Wait for the next message and process it; None if none arrives by `deadline`."""
        message = self._rendezvous.receive(deadline)
        if message is not None:
            self._note(message)
        return message

    def _next(self, deadline: Deadline, names: Collection[str], what: str) -> Message:
        """Wait for the next message and process it. Raises `DeadlineExceededError` naming `names`, or the interruption."""
        self._check_interruption()
        message = self._receive(deadline)
        if message is None:
            named = ", ".join(sorted(names))
            raise deadline.error(f"{named} {what}", part=COORDINATOR, peer=named)
        self._check_interruption()
        return message

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
            if not _is_death(message):
                self._roster.note_answer(getattr(message, "name", ""))
            if getattr(message, "session", None) == self.session:
                self._keep(message)

    def _keep(self, message: Message) -> None:
        """Keep a message of this session that may arrive before it is waited for."""
        if isinstance(message, Offer):
            self.offers[message.version] = message
            self._publisher_failures.pop((message.version, message.name), None)  # it was published again
        elif isinstance(message, Failed) and message.name in self._roster.publishers:
            self._publisher_failures[message.version, message.name] = message
        elif isinstance(message, Hello):
            self.hellos[message.name] = message
        elif isinstance(message, Ready | Staged):
            self._early[type(message), message.name, message.version] = message

    # -- waiting for replies ------------------------------------------------------------------------------------------------

    def collect(self, kind: type[M], names: Iterable[str], version: int, deadline: Deadline, what: str) -> list[M]:
        """Wait for one message of `kind` from each of `names`; see `replies`."""
        replies = self.replies({(kind, name) for name in names}, version, deadline, what)
        return [message for message in replies if isinstance(message, kind)]

    def replies(
        self, awaited: Collection[tuple[type[Reply], str]], version: int, deadline: Deadline, what: str
    ) -> Iterator[Reply]:
        """Yield one message of each awaited kind and participant as it arrives; `version` is -1 while connecting.

        Raises `AttemptError` when a participant reports a failure, dies, or does not answer in time.
        """
        missing: dict[str, set[type[Reply]]] = defaultdict(set)
        for kind, name in awaited:
            missing[name].add(kind)
        names = set(missing)
        replicas = self._roster.replicas_of(names)
        for kind, name in awaited:
            if (early := self._early.pop((kind, name, version), None)) is not None:
                _remove(missing, kind, name)
                yield early
        while missing:
            self.check_present(names, sending=version >= 0)
            try:
                message = self._next(deadline, missing, what)
            except DeadlineExceededError as error:
                trainer_late = not missing.keys().isdisjoint(self._roster.publishers)
                raise AttemptError(error, () if trainer_late else self._roster.replicas_of(missing)) from error
            if self._is_failure_of(message, version):
                raise self._blamed(message, version)
            if isinstance(message, Lost) and (not message.replica or message.replica in replicas):
                raise _lost(message)
            if isinstance(message, Offer) and Offer in missing.get(message.name, ()):
                self.check_offerable(version, message.name)
            if (
                isinstance(message, Reply)
                and type(message) in missing.get(message.name, ())
                and self._is_of(message, version)
            ):
                _remove(missing, type(message), message.name)
                self._early.pop((type(message), message.name, version), None)
                yield message

    def collect_some(
        self, kind: type[M], names: Iterable[str], version: int, deadline: Deadline, what: str
    ) -> tuple[list[M], dict[str, WeightlaneError]]:
        """Like `collect`, but a participant that fails, dies or does not answer in time does not fail the others.

        Returns the replies, and the errors by participant. Raises `AttemptError` only for a trainer's failure.
        """
        waiting = set(names)
        replies: list[M] = []
        errors: dict[str, WeightlaneError] = {}
        while True:
            errors |= {name: _gone(self.gone[name]) for name in waiting & self.gone.keys()}
            waiting.difference_update(errors)
            if not waiting:
                return replies, errors
            try:
                message = self._next(deadline, waiting, what)
            except DeadlineExceededError as error:
                return replies, errors | dict.fromkeys(waiting, error)
            sender = getattr(message, "name", "")
            if self._is_failure_of(message, version):
                if sender not in waiting:
                    raise self._blamed(message, version)
                errors[sender] = error_from_wire(message.error)
            elif isinstance(message, Lost):
                if not message.replica:
                    raise _lost(message)
                entry = self._roster.entries.get(message.replica)
                lost = waiting.intersection(entry.subscribers if entry else ())
                errors |= dict.fromkeys(lost, error_from_wire(message.error))
            elif isinstance(message, kind) and sender in waiting and self._is_of(message, version):
                replies.append(message)
                waiting.discard(sender)

    def check_present(self, names: Collection[str], *, sending: bool) -> None:
        """Raise `AttemptError` if one of `names` has left or restarted since it was invited.

        Args:
            names: Publishers and subscribers.
            sending: Whether bytes may have been sent already. If not, a restarted participant has only missed messages.
        """
        for name in self.gone.keys() & names:
            message = self.gone[name]
            if not sending and isinstance(message, Joined):
                raise AttemptError(_gone(message), free_retry=True)  # no replica is excluded
            raise AttemptError(_gone(message), self._roster.replicas_of([name]))

    def loss_of(self, entry: RosterEntry) -> WeightlaneError | None:
        """Why the processes of a replica are not those that were invited, or are dead; None if they are there."""
        gone = [_gone(self.gone[name]) for name in entry.subscribers if name in self.gone]
        return gone[0] if gone else entry.error if entry.state is ReplicaState.LOST else None

    def check_offerable(self, version: int, publisher: str) -> None:
        """Raise `AttemptError` if `publisher` has offered a newer version in this session and therefore dropped `version`."""
        if newer := [other for other in self.offers if other > version]:
            error = ProtocolError(
                f"version {version} is not held any more, {publisher} has published {max(newer)}.",
                part=COORDINATOR,
                peer=publisher,
            )
            raise AttemptError(error, final=True)

    def check_not_failed(self, version: int) -> None:
        """Raise `AttemptError` if a publisher has already reported in this session that it failed with `version`."""
        if failures := [failed for (other, _), failed in self._publisher_failures.items() if other == version]:
            raise blame(failures, self._roster)

    def _is_of(self, message: Reply, version: int) -> bool:
        return message.session == self.session and getattr(message, "version", -1) == version

    def _is_failure_of(self, message: Message, version: int) -> TypeGuard[Failed]:
        return isinstance(message, Failed) and message.session == self.session and message.version in (-1, version)

    def _blamed(self, first: Failed, version: int) -> AttemptError:
        """Wait for further reports of the same failure, and find the replicas at fault."""
        failures = [first]
        deadline = Deadline.after(_FURTHER_FAILURES_S)
        while (message := self._receive(deadline)) is not None:
            if isinstance(message, Lost):
                return _lost(message)
            if self._is_failure_of(message, version):
                failures.append(message)
        return blame(failures, self._roster)


def _remove(missing: dict[str, set[type[Reply]]], kind: type[Reply], name: str) -> None:
    missing[name].discard(kind)
    if not missing[name]:
        del missing[name]


def _is_death(message: Message) -> bool:
    """Whether this is the report of a commit whose replica has died, which the coordinator makes in the replica's name."""
    return isinstance(message, Failed) and isinstance(error_from_wire(message.error), WorkerDiedError)


def _lost(message: Lost) -> AttemptError:
    """The error of an attempt in which a replica was lost, or a trainer; without a trainer no attempt can succeed."""
    replica = message.replica
    return AttemptError(error_from_wire(message.error), [replica] if replica else [], final=not replica)


def _gone(message: Left | Joined) -> PeerLostError:
    what = "has closed" if isinstance(message, Left) else "has restarted"
    return PeerLostError(f"{message.name} {what}.", part=COORDINATOR, peer=message.name)
