"""`Replies`: waits for the participants' replies to the coordinator's messages, and for failures instead of replies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import TypeGuard, TypeVar

from weightlane.ckpt_engines import (
    Deadline,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    WeightlaneError,
    error_from_wire,
)

from ..hub.frames import COORDINATOR
from ..messages import (
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
    Sent,
    Staged,
)
from .blame import AttemptError, blame
from .message_queue import MessageQueue
from .roster import Roster

_FURTHER_FAILURES_S = 0.1
"""Seconds to wait for further failures after the first: the participant that knows the culprit may not report first."""

Reply = Hello | Connected | Offer | Accepted | Ready | Sent | Staged
M = TypeVar("M", Hello, Connected, Offer, Accepted, Ready, Sent, Staged)


class Replies:
    """Waits for replies of the current session, on the thread that uses `queue`."""

    def __init__(self, queue: MessageQueue, roster: Roster) -> None:
        self._queue = queue
        self._roster = roster

    def collect(self, kind: type[M], names: Iterable[str], version: int, deadline: Deadline, what: str) -> list[M]:
        """Wait for one message of `kind` from each of `names`; see `each`."""
        replies = self.each({(kind, name) for name in names}, version, deadline, what)
        return [message for message in replies if isinstance(message, kind)]

    def each(
        self, awaited: Collection[tuple[type[Reply], str]], version: int, deadline: Deadline, what: str
    ) -> Iterator[Reply]:
        """Yield one message of each awaited kind and participant as it arrives; `version` is -1 while connecting.

        Raises `AttemptError` when a participant reports a failure, dies, or does not answer in time.
        """
        missing = _Awaited(awaited)
        names = {name for _, name in awaited}
        replicas = {entry.name for name in names if (entry := self._roster.entry_of(name))}
        for kind, name in awaited:
            if (early := self._queue.early.pop((kind, name, version), None)) is not None:
                missing.discard(kind, name)
                yield early
        while missing:
            self.check_present(names, sending=version >= 0)
            try:
                message = self._queue.next(deadline, missing.names, what)
            except DeadlineExceededError as error:
                late = {entry.name for name in missing.names if (entry := self._roster.entry_of(name))}
                trainer_late = not missing.names.keys().isdisjoint(self._roster.publishers)
                raise AttemptError(error, () if trainer_late else late) from error
            if self._is_failure_of(message, version):
                raise self._blamed(message, version)
            if isinstance(message, Lost) and (not message.replica or message.replica in replicas):
                raise _lost(message)
            if isinstance(message, Offer) and (Offer, message.name) in missing:
                self.check_offerable(version, message.name)
            if (
                isinstance(message, Reply)
                and (type(message), message.name) in missing
                and self._is_of(message, version)
            ):
                missing.discard(type(message), message.name)
                self._queue.early.pop((type(message), message.name, version), None)
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
            errors |= {name: _gone(self._queue.gone[name]) for name in waiting & self._queue.gone.keys()}
            waiting.difference_update(errors)
            if not waiting:
                return replies, errors
            try:
                message = self._queue.next(deadline, waiting, what)
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
        for name in self._queue.gone.keys() & names:
            message = self._queue.gone[name]
            if not sending and isinstance(message, Joined):
                raise AttemptError(_gone(message), free_retry=True)  # no replica is excluded
            entry = self._roster.entry_of(name)
            raise AttemptError(_gone(message), [entry.name] if entry else [])

    def check_offerable(self, version: int, publisher: str) -> None:
        """Raise `AttemptError` if `publisher` has offered a newer version in this session and therefore dropped `version`."""
        if newer := [other for other in self._queue.offers if other > version]:
            error = ProtocolError(
                f"version {version} is not held any more, {publisher} has published {max(newer)}.",
                part=COORDINATOR,
                peer=publisher,
            )
            raise AttemptError(error, final=True)

    def check_not_failed(self, version: int) -> None:
        """Raise `AttemptError` if a publisher has already reported in this session that it failed with `version`."""
        if failures := [failed for (other, _), failed in self._queue.publisher_failures.items() if other == version]:
            raise blame(failures, self._roster)

    def _is_of(self, message: Reply, version: int) -> bool:
        return message.session == self._queue.session and getattr(message, "version", -1) == version

    def _is_failure_of(self, message: Message, version: int) -> TypeGuard[Failed]:
        return (
            isinstance(message, Failed) and message.session == self._queue.session and message.version in (-1, version)
        )

    def _blamed(self, first: Failed, version: int) -> AttemptError:
        """Wait for further reports of the same failure, and find the replicas at fault."""
        failures = [first]
        deadline = Deadline.after(_FURTHER_FAILURES_S)
        while (message := self._queue.receive(deadline)) is not None:
            if isinstance(message, Lost):
                return _lost(message)
            if self._is_failure_of(message, version):
                failures.append(message)
        return blame(failures, self._roster)


class _Awaited:
    """Replies that have not arrived, and the names of their senders, which need not be recomputed for each reply."""

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


def _lost(message: Lost) -> AttemptError:
    """The error of an attempt in which a replica was lost, or a trainer; without a trainer no attempt can succeed."""
    replica = message.replica
    return AttemptError(error_from_wire(message.error), [replica] if replica else [], final=not replica)


def _gone(message: Left | Joined) -> PeerLostError:
    what = "has closed" if isinstance(message, Left) else "has restarted"
    return PeerLostError(f"{message.name} {what}.", part=COORDINATOR, peer=message.name)
