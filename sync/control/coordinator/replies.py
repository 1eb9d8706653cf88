"""`Replies`: waits for the participants' replies to the coordinator's messages. `blame`: who is at fault if they fail instead."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TypeGuard, TypeVar

from weightlane.ckpt_engines import (
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
    Sent,
    Staged,
)
from .message_queue import MessageQueue
from .roster import Roster

_PEER_LOST = TransportError | DeadlineExceededError | QuarantinedError
"""Errors that mean a peer was lost. `QuarantinedError` is raised when the loss interrupts an in-place commit."""

_FURTHER_FAILURES_S = 0.1
"""Seconds to wait for further failures after the first: the participant that knows the culprit may not report first."""
Reply = Hello | Connected | Offer | Accepted | Ready | Sent | Staged
M = TypeVar("M", Hello, Connected, Offer, Accepted, Ready, Sent, Staged)


class AttemptError(Exception):
    """An attempt to connect the participants, or to send a version to them, has failed.

    Attributes:
        error: The typed failure.
        culprits: Names of the replicas at fault; empty when no replica can be blamed.
        final: Another attempt would fail as well.
        free_retry: The next attempt avoids the cause, and does not count as a retry.
    """

    def __init__(
        self, error: WeightlaneError, culprits: Iterable[str] = (), *, final: bool = False, free_retry: bool = False
    ) -> None:
        super().__init__(str(error))
        self.error = error
        self.culprits = frozenset(culprits)
        self.final = final
        self.free_retry = free_retry


def blame(failures: Sequence[Failed], roster: Roster) -> AttemptError:
    """The error of an attempt in which participants reported `failures`, with the replicas at fault."""

    def replicas_named(error: WeightlaneError) -> set[str]:
        return {entry.name for name in error.peer.split(", ") if (entry := roster.entry_of(name))}

    # A sender's error names the receiver that did not take a bucket.
    for failure in failures:
        error = error_from_wire(failure.error)
        if failure.name in roster.publishers and (named := replicas_named(error)):
            return AttemptError(error, named)
    # If a receiver has lost its sender, or has timed out waiting for it, the receiver is not at fault.
    lost = _lost_peers(failures)
    for failure in failures:
        if roster.entry_of(failure.name) is None:
            continue
        error = error_from_wire(failure.error)
        if isinstance(error, _PEER_LOST):
            if failure.name not in lost:
                continue  # its other failure is more specific
            error = _root_cause(failure.name, lost)
            if error.peer in roster.publishers:
                continue
            if named := replicas_named(error):
                return AttemptError(error, named)
        alike = (other for other in failures if other.error["type"] == failure.error["type"])
        return AttemptError(error, {entry.name for other in alike if (entry := roster.entry_of(other.name))})
    first = failures[0]
    error = _root_cause(first.name, lost) if first.name in lost else error_from_wire(first.error)
    return AttemptError(error, final=isinstance(error, SupersededError | ManifestError))


def _lost_peers(failures: Iterable[Failed]) -> dict[str, WeightlaneError]:
    """The errors of participants that report a lost peer and no other failure, by the participant's name."""
    lost: dict[str, WeightlaneError] = {}
    failed_itself = set()
    for failure in failures:
        error = error_from_wire(failure.error)
        if isinstance(error, _PEER_LOST):
            lost.setdefault(failure.name, error)
        else:
            failed_itself.add(failure.name)
    return {name: error for name, error in lost.items() if name not in failed_itself}


def _root_cause(name: str, lost: Mapping[str, WeightlaneError]) -> WeightlaneError:
    """Follow the chain of ranks that wait for one another from `name`. Returns the last error, which names the root cause.

    If two ranks blame each other, the report of `name`, which came first, counts: a sender fails before its receiver.
    """
    error, visited = lost[name], {name}
    while (cause := lost.get(error.peer)) is not None and cause.peer not in visited:
        visited.add(error.peer)
        error = cause
    return error


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
        missing: dict[str, set[type[Reply]]] = defaultdict(set)
        for kind, name in awaited:
            missing[name].add(kind)
        names = set(missing)
        replicas = {entry.name for name in names if (entry := self._roster.entry_of(name))}
        for kind, name in awaited:
            if (early := self._queue.early.pop((kind, name, version), None)) is not None:
                _remove(missing, kind, name)
                yield early
        while missing:
            self.check_present(names, sending=version >= 0)
            try:
                message = self._queue.next(deadline, missing, what)
            except DeadlineExceededError as error:
                late = {entry.name for name in missing if (entry := self._roster.entry_of(name))}
                trainer_late = not missing.keys().isdisjoint(self._roster.publishers)
                raise AttemptError(error, () if trainer_late else late) from error
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


def _remove(missing: dict[str, set[type[Reply]]], kind: type[Reply], name: str) -> None:
    missing[name].discard(kind)
    if not missing[name]:
        del missing[name]


def _lost(message: Lost) -> AttemptError:
    """The error of an attempt in which a replica was lost, or a trainer; without a trainer no attempt can succeed."""
    replica = message.replica
    return AttemptError(error_from_wire(message.error), [replica] if replica else [], final=not replica)


def _gone(message: Left | Joined) -> PeerLostError:
    what = "has closed" if isinstance(message, Left) else "has restarted"
    return PeerLostError(f"{message.name} {what}.", part=COORDINATOR, peer=message.name)
