"""The coordinator's letters: its inbox, the inboxes of everybody who joined, and waiting for answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeVar

from weightlane.ckpt_engines import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    ManifestError,
    PeerLostError,
    ProtocolError,
    QuarantinedError,
    SupersededError,
    TransportError,
    WeightlaneError,
    error_from_wire,
)

from .hub.hub import COORDINATOR
from .messages import (
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
from .rendezvous import Rendezvous
from .roster import Roster

_SETTLE_S = 0.1
"""How long the first failure waits for others: whoever knows whose fault it was may not have been the first to speak."""

_LOST = TransportError | DeadlineExceededError | QuarantinedError
"""What one fails with who has lost a peer; the last where that interrupts it while it writes in place."""

Reply = Hello | Connected | Offer | Accepted | Ready | Sent | Staged
M = TypeVar("M", Hello, Connected, Offer, Accepted, Ready, Sent, Staged)


class TroubleError(Exception):
    """What was waited for will not come.

    Attributes:
        error: The typed failure.
        culprits: Replicas at fault, by name; empty when nobody can be blamed or a trainer is to.
        hopeless: Trying again is of no use.
        again: Trying again, in the way that is known by now, is no retry.
    """

    def __init__(
        self, error: WeightlaneError, culprits: Iterable[str] = (), *, hopeless: bool = False, again: bool = False
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.culprits = frozenset(culprits)
        self.hopeless = hopeless
        self.again = again


class MessageQueue:
    """Sends to and hears from the participants of a run. Used by one thread at a time.

    Args:
        rendezvous: The hosted store.
        roster: Kept up to date with who joins, leaves, dies and answers.
    """

    def __init__(self, rendezvous: Rendezvous, roster: Roster) -> None:
        self._rendezvous = rendezvous
        self._inbox = rendezvous.inbox(COORDINATOR)
        self._roster = roster
        self.session = ""
        """Replies of any other one are not answers."""
        self.offers: dict[int, Offer] = {}
        """Offers of this session, by version: publishing does not wait for anybody."""
        self.hellos: dict[str, Hello] = {}
        """Who has answered this session's `Reset`."""
        self._failed: dict[tuple[int, str], Failed] = {}
        """Versions of which a publisher has said in this session that it cannot offer or send them."""
        self._progress: dict[tuple[type[Reply], str, int], Reply] = {}
        """What subscribers of this session have said of a version before anybody asked: some are quicker than others accept."""
        self._gone: dict[str, Left | Joined] = {}
        """Who has left, or was started anew, since it was invited, and so knows nothing of this session."""
        self.interruption: WeightlaneError | None = None
        """Why whoever waits for mail is not to wait any longer. Set on another thread, which posts something as well."""

    def begin(self, session: str, names: Iterable[str]) -> None:
        """From now on `session` counts, and `names` are invited to it; what the one before has left in mailboxes goes."""
        self._rendezvous.forget_session(self.session)
        self.session = session
        self.offers.clear()
        self.hellos.clear()
        self._progress.clear()
        self._failed.clear()
        self.invite(names)

    def invite(self, names: Iterable[str]) -> None:
        """Ask participants into the session; each answers with a `Hello`."""
        names = list(names)
        for name in names:
            self.hellos.pop(name, None)
            self._gone.pop(name, None)
        self.post_all(names, Reset(session=self.session))

    @property
    def stale(self) -> bool:
        """Whether a publisher has left, or was started anew, since the session began."""
        return self._publishers(self._gone)

    def is_gone(self, name: str) -> bool:
        """Whether a participant has left, or was started anew, since it was invited."""
        return name in self._gone

    def post(self, name: str, message: Message) -> None:
        """Write to a participant, if it has joined."""
        self.post_all([name], message)

    def post_all(self, names: Iterable[str], message: Message) -> None:
        """Write to those of several that have joined."""
        inboxes = self._roster.inboxes
        self._rendezvous.post_all([inboxes[name] for name in names if name in inboxes], message)

    def wait_until_read(self, names: Iterable[str], deadline: Deadline) -> list[str]:
        """Those among `names` that have not read all that was written to them by `deadline`."""
        inboxes = {inbox: name for name in names if (inbox := self._roster.inboxes.get(name)) is not None}
        return [inboxes[inbox] for inbox in self._rendezvous.wait_until_read(inboxes, deadline)]

    def catch_up(self) -> None:
        """Take note of everything that has come in meanwhile."""
        while (message := self._inbox.get_nowait()) is not None:
            if isinstance(message, Stop):
                raise ClosedError("the coordinator was closed.", part="coordinator")
            self._note(message)

    def wait_for_joined(self, names: Iterable[str], deadline: Deadline) -> None:
        """Return when all have joined; `DeadlineExceededError` naming who has not."""
        while missing := set(names) - self._roster.inboxes.keys():
            self._note(self._next(deadline, missing, "to join"))

    def collect(self, kind: type[M], names: Iterable[str], version: int, deadline: Deadline, what: str) -> list[M]:
        """One message of `kind` from each; see `gather`."""
        replies = self.gather({(kind, name) for name in names}, version, deadline, what)
        return [message for message in replies if isinstance(message, kind)]

    def gather(
        self,
        awaited: set[tuple[type[Reply], str]],
        version: int,
        deadline: Deadline,
        what: str,
        heard: Callable[[Reply], None] = lambda _: None,
    ) -> list[Reply]:
        """One message of each awaited kind from each awaited name; `version` is -1 while connecting.

        Each is `heard` when it comes. Raises `TroubleError` when somebody reports a failure, dies, or does not answer in time.
        """
        missing = _Awaited(awaited)
        names = {name for _, name in awaited}
        replies: list[Reply] = []
        members = {member.name for _, name in awaited if (member := self._roster.owner(name))}
        for kind, name in awaited:
            if (told := self._progress.pop((kind, name, version), None)) is not None:
                missing.discard(kind, name)
                replies.append(told)
                heard(told)
        while missing:
            self.check_present(names, sending=version >= 0)
            try:
                message = self._next(deadline, missing.names, what)
            except DeadlineExceededError as error:
                late = {member.name for name in missing.names if (member := self._roster.owner(name))}
                raise TroubleError(error, late if late and not self._publishers(missing.names) else ()) from error
            if self.concerns(message, version):
                raise self._trouble(message, version)
            if isinstance(message, Lost) and (not message.replica or message.replica in members):
                lost = error_from_wire(message.error)
                raise TroubleError(lost, filter(None, [message.replica]), hopeless=not message.replica)
            if isinstance(message, Offer) and (Offer, message.name) in missing:
                self.check_held(version, message.name)
            if (
                isinstance(message, Reply)
                and (type(message), message.name) in missing
                and message.session == self.session
                and getattr(message, "version", -1) == version
            ):
                missing.discard(type(message), message.name)
                self._progress.pop((type(message), message.name, version), None)
                replies.append(message)
                heard(message)
        return replies

    def check_present(self, names: Collection[str], *, sending: bool) -> None:
        """`TroubleError` if one of `names` has left, or was started anew, since it was invited.

        Args:
            names: Publishers and subscribers.
            sending: Whether something may have been sent already. If not, who was started anew has only missed questions.
        """
        for name in self._gone.keys() & names:
            message = self._gone[name]
            if not sending and isinstance(message, Joined):
                raise TroubleError(_gone(message), again=True)  # which leaves nobody out
            owner = self._roster.owner(name)
            raise TroubleError(_gone(message), [owner.name] if owner else [])

    def check_held(self, version: int, publisher: str) -> None:
        """`TroubleError` if a newer version was offered in this session: `publisher` cannot offer `version` any more."""
        if newer := [other for other in self.offers if other > version]:
            error = ProtocolError(
                f"version {version} is not held any more, {publisher} has published {max(newer)}.",
                part="coordinator",
                peer=publisher,
            )
            raise TroubleError(error, hopeless=True)

    def check_failed(self, version: int) -> None:
        """`TroubleError` if a publisher has said already, in this session, that it failed with `version`."""
        if failures := [message for (other, _), message in self._failed.items() if other == version]:
            raise self._verdict(failures)

    def answers(
        self, kind: type[M], names: Iterable[str], version: int, deadline: Deadline, what: str
    ) -> tuple[list[M], dict[str, WeightlaneError]]:
        """As `collect`, but one that fails, dies or does not answer in time does not spoil it for the others.

        Returns the replies, and the errors by name. A trainer's failure still raises.
        """
        waiting = set(names)
        replies: list[M] = []
        errors: dict[str, WeightlaneError] = {}
        while True:
            errors |= {name: _gone(self._gone[name]) for name in waiting & self._gone.keys()}
            waiting.difference_update(errors)
            if not waiting:
                return replies, errors
            try:
                message = self._next(deadline, waiting, what)
            except DeadlineExceededError as error:
                return replies, errors | dict.fromkeys(waiting, error)
            sender = getattr(message, "name", "")
            if isinstance(message, Failed) and self.concerns(message, version):
                if sender not in waiting:
                    raise self._trouble(message, version)
                errors[sender] = error_from_wire(message.error)
            elif isinstance(message, Lost):
                lost = error_from_wire(message.error)
                if not message.replica:
                    raise TroubleError(lost, hopeless=True)
                gone = self._roster.members.get(message.replica)
                errors |= dict.fromkeys(waiting.intersection(gone.names if gone else ()), lost)
            elif (
                isinstance(message, kind)
                and message.session == self.session
                and getattr(message, "version", -1) == version
                and sender in waiting
            ):
                replies.append(message)
                waiting.discard(sender)

    def concerns(self, message: Message, version: int) -> bool:
        """Whether a message is a failure of what is under way."""
        return isinstance(message, Failed) and message.session == self.session and message.version in (-1, version)

    def _next(self, deadline: Deadline, names: Collection[str], what: str) -> Message:
        self._check_interruption()
        try:
            message = self._inbox.get(deadline)
        except DeadlineExceededError:
            named = ", ".join(sorted(names))
            raise deadline.error(f"{named} {what}", part="coordinator", peer=named) from None
        if isinstance(message, Stop):
            raise ClosedError("the coordinator was closed.", part="coordinator")
        self._note(message)
        self._check_interruption()
        return message

    def _check_interruption(self) -> None:
        if self.interruption is not None:
            raise self.interruption

    def _note(self, message: Message) -> None:
        if isinstance(message, Joined | Left):
            note = self._roster.joined if isinstance(message, Joined) else self._roster.left
            if note(message.name, message.inbox):
                self._gone[message.name] = message
                self.hellos.pop(message.name, None)
        elif isinstance(message, Lost):
            if member := self._roster.members.get(message.replica):
                self._roster.lost(member, error_from_wire(message.error))
        else:
            self._roster.answered(getattr(message, "name", ""))
            if getattr(message, "session", None) == self.session:
                self._keep(message)

    def _keep(self, message: Message) -> None:
        """Of this session, what may come before somebody waits for it."""
        if isinstance(message, Offer):
            self.offers[message.version] = message
            self._failed.pop((message.version, message.name), None)  # it was published once more
        elif isinstance(message, Failed) and self._publishers([message.name]):
            self._failed[message.version, message.name] = message
        elif isinstance(message, Hello):
            self.hellos[message.name] = message
        elif isinstance(message, Ready | Staged):
            self._progress[type(message), message.name, message.version] = message

    def _publishers(self, names: Iterable[str]) -> bool:
        return not set(names).isdisjoint(self._roster.publishers)

    def _trouble(self, first: Message, version: int) -> TroubleError:
        """Hear what others have to say of the same failure, and find out who was at fault."""
        failures = [first] if isinstance(first, Failed) else []
        deadline = Deadline.after(_SETTLE_S)
        while True:
            try:
                message = self._inbox.get(deadline)
            except DeadlineExceededError:
                return self._verdict(failures)
            self._note(message)
            if isinstance(message, Stop):
                raise ClosedError("the coordinator was closed.", part="coordinator")
            if isinstance(message, Lost):
                hopeless = not message.replica
                return TroubleError(error_from_wire(message.error), filter(None, [message.replica]), hopeless=hopeless)
            if isinstance(message, Failed) and self.concerns(message, version):
                failures.append(message)

    def _verdict(self, failures: list[Failed]) -> TroubleError:
        # The sender knows which receiver did not take a bucket.
        for failure in failures:
            error = error_from_wire(failure.error)
            if failure.name in self._roster.publishers and (named := self._replicas_named(error)):
                return TroubleError(error, named)
        # A receiver that lost whom it gets buckets from, or waited in vain, says nothing about itself.
        lost = _lost_peers(failures)
        for failure in failures:
            if self._roster.owner(failure.name) is None:
                continue
            error = error_from_wire(failure.error)
            if isinstance(error, _LOST):
                if failure.name not in lost:
                    continue  # what it failed with itself says more
                error = _where_the_way_ends(failure.name, lost)
                if error.peer in self._roster.publishers:
                    continue
                if named := self._replicas_named(error):
                    return TroubleError(error, named)
            blamed = {
                member.name
                for other in failures
                if other.error["type"] == failure.error["type"] and (member := self._roster.owner(other.name))
            }
            return TroubleError(error, blamed)
        first = failures[0]
        error = _where_the_way_ends(first.name, lost) if first.name in lost else error_from_wire(first.error)
        return TroubleError(error, hopeless=isinstance(error, SupersededError | ManifestError))

    def _replicas_named(self, error: WeightlaneError) -> set[str]:
        """The replicas that an error is about."""
        return {member.name for name in error.peer.split(", ") if (member := self._roster.owner(name))}


class _Awaited:
    """Replies that have not come, and from whom: names are not collected anew for each of a thousand replies."""

    def __init__(self, awaited: Iterable[tuple[type[Reply], str]]) -> None:
        self._replies = set(awaited)
        self.names = Counter(name for _, name in self._replies)

    def __len__(self) -> int:
        return len(self._replies)

    def __contains__(self, reply: object) -> bool:
        return reply in self._replies

    def discard(self, kind: type[Reply], name: str) -> None:
        self._replies.discard((kind, name))
        self.names[name] -= 1
        if not self.names[name]:
            del self.names[name]


def _lost_peers(failures: Iterable[Failed]) -> dict[str, WeightlaneError]:
    """Who of them has lost a peer, and nothing else happened to it, and how."""
    lost: dict[str, WeightlaneError] = {}
    failed_itself = set()
    for failure in failures:
        error = error_from_wire(failure.error)
        if isinstance(error, _LOST):
            lost.setdefault(failure.name, error)
        else:
            failed_itself.add(failure.name)
    return {name: error for name, error in lost.items() if name not in failed_itself}


def _where_the_way_ends(name: str, lost: Mapping[str, WeightlaneError]) -> WeightlaneError:
    """What ranks that wait for one another wait for: the error of the last on the way to whoever has not failed itself.

    Of two that accuse each other `name`, who spoke first, is believed: a sender gives up before its receiver does.
    """
    error, passed = lost[name], {name}
    while (before := lost.get(error.peer)) is not None and before.peer not in passed:
        passed.add(error.peer)
        error = before
    return error


def _gone(message: Left | Joined) -> PeerLostError:
    what = "has closed" if isinstance(message, Left) else "was started anew"
    return PeerLostError(f"{message.name} {what}.", part="coordinator", peer=message.name)
