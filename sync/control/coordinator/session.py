"""`Session`: the current connection of trainers and rollouts, and the streaming of versions over it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from weightlane.ckpt_engines import (
    Deadline,
    DeadlineExceededError,
    DeltaBaseError,
    ManifestError,
    ProtocolError,
    QuorumError,
    WeightlaneError,
)

from ...config import SyncConfig
from ..messages import (
    COORDINATOR,
    Accepted,
    Connect,
    Connected,
    EngineTraits,
    Full,
    Go,
    Hello,
    Offer,
    Open,
    Ready,
    Sent,
    Staged,
)
from .blame import AttemptError
from .message_queue import MessageQueue, Reply
from .replicas import Roster, RosterEntry

# The participant closest to the cause of a stall fails first, so that the reported error names the right peer.
_PUBLISHER_SHARE = 0.9
_SUBSCRIBER_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Streamed:
    """A version that `replicas` have completely, in their staging memory or already written into their weights."""

    offer: Offer
    replicas: list[RosterEntry]
    sent: list[Sent]
    staged: list[Staged]
    refused: dict[str, WeightlaneError]
    """Why replicas did not accept the version, by name."""


class Session:
    """Connects publishers and subscribers, in one session after another, and streams versions. Used by one thread at a time."""

    def __init__(self, queue: MessageQueue, roster: Roster, config: SyncConfig) -> None:
        self._queue = queue
        self._roster = roster
        self._config = config
        self._receivers: dict[str, None] = {}
        """Every connected subscriber."""
        self._traits: EngineTraits | None = None
        self._relayed = False
        """Whether subscribers relay to others in the current session."""
        self._stored: dict[int, Offer] = {}
        """Versions that were sent in full and can be read again without the sender."""
        self._sent_as_delta: set[int] = set()
        """Versions that were sent as deltas in this session: a store does not have them in full."""
        self._full = -1
        """The version that is to be sent in full, because a replica lacks the base of its delta."""
        self._up = False
        self.had_everyone = False
        """Whether a connection was established once; the first one needs all participants."""

    @property
    def name(self) -> str:
        """Name of the current session, or of the last one."""
        return self._queue.session

    def abandon(self) -> None:
        """Make the next `ensure_connected` start a new session."""
        self._up = False

    def ensure_connected(self, targets: Sequence[RosterEntry], deadline: Deadline, *, everyone: bool = False) -> None:
        """Connect `targets`, with as few new connections as the engine allows.

        Replicas that do not answer are marked as lost and excluded; with `everyone`, `AttemptError` is raised instead.
        """
        self._queue.catch_up()
        wanted = _subscribers(self._roster.reachable() if self._selective else targets)
        alive = self._up and self._queue.gone.keys().isdisjoint(self._roster.publishers)
        if alive and self._traits and self._traits.elastic:
            if newcomers := [name for name in _subscribers(targets) if not self._is_connected(name)]:
                self._attach(newcomers, deadline)
        elif not alive or {name for name in self._receivers if self._is_connected(name)} != set(wanted):
            self._start(wanted, deadline, everyone=everyone)
            # Only the plan of the new session tells whether there are relays. If so, only `targets` may be connected.
            ours = self._connected_of(targets)
            if not self._selective and len(ours) < len(self._receivers):
                self._start(ours, deadline, everyone=False)
        self.had_everyone = True

    @property
    def _selective(self) -> bool:
        """Whether a version can be sent to some receivers of a session only; assumed until the engine's traits are known."""
        return (self._traits is None or self._traits.selective) and not self._relayed

    def _is_connected(self, name: str) -> bool:
        return name in self._receivers and name not in self._queue.gone

    def _start(self, subscribers: Sequence[str], deadline: Deadline, *, everyone: bool) -> None:
        """End the current session and connect all publishers and `subscribers` in a new one."""
        self._up = False
        publishers = list(self._roster.publishers)
        self._queue.wait_for_joined(publishers, deadline)
        self._queue.start_session(f"s-{secrets.token_hex(6)}", [*publishers, *subscribers])
        self._stored.clear()
        self._sent_as_delta.clear()
        self._queue.collect(Hello, publishers, -1, deadline, "to answer")
        self._traits = self._queue.hellos[publishers[0]].traits
        limit = deadline if everyone else deadline.within(self._config.rejoin_s)
        answered = self._await_hellos(subscribers, limit, everyone=everyone)
        self._receivers = dict.fromkeys(answered)
        self._connect([*publishers, *self._receivers], deadline)
        self._up = True

    def _attach(self, newcomers: Sequence[str], deadline: Deadline) -> None:
        """Connect further receivers to the current session, without changes for the others."""
        for name in newcomers:
            self._receivers.pop(name, None)
        self._queue.invite(newcomers)
        answered = self._await_hellos(newcomers, deadline.within(self._config.rejoin_s))
        self._receivers |= dict.fromkeys(answered)
        self._connect(answered, deadline)

    def _await_hellos(self, subscribers: Sequence[str], deadline: Deadline, *, everyone: bool = False) -> list[str]:
        """Wait for the subscribers' answers to the invitation. Returns those whose replica's ranks have all answered.

        The other replicas are marked as lost; with `everyone`, `AttemptError` is raised instead.
        """
        silent = [name for name in subscribers if name not in self._queue.hellos]
        _, errors = self._queue.collect_some(Hello, silent, -1, deadline, "to answer")
        if everyone:
            self._queue.check_present(subscribers, sending=False)
            for error in errors.values():
                raise AttemptError(error)
        for name, error in errors.items():
            # A subscriber that restarted in the meantime has not been invited yet.
            if name not in self._queue.gone and (entry := self._roster.entry_of(name)):
                self._roster.mark_lost(entry, error)
        hellos = self._queue.hellos
        return [
            name
            for name in subscribers
            if (entry := self._roster.entry_of(name)) and all(other in hellos for other in entry.subscribers)
        ]

    def _connect(self, names: Sequence[str], deadline: Deadline) -> None:
        """Have the participants `names` connect their links."""
        hellos = self._queue.hellos
        message = Connect(
            session=self.name,
            publishers=list(self._roster.publishers),
            # In the roster's order, not in the order of answers: the same ranks get the same plan in every session.
            needs={name: hellos[name].need for name in self._receivers if name in hellos},
            deadline_s=deadline.within(self._config.connect_timeout_s).remaining_s * _SUBSCRIBER_SHARE,
        )
        self._queue.post_all(names, message)
        try:
            connected = self._queue.collect(Connected, names, -1, deadline, "to connect")
        except AttemptError as failed:
            if isinstance(failed.error, ManifestError):
                self._roster.note_misfits(failed.culprits, failed.error)
            raise
        _check_plans(connected, self._roster)
        self._relayed = any(message.relays for message in connected)

    def stream(
        self,
        version: int,
        targets: Sequence[RosterEntry],
        needed: int,
        deadline: Deadline,
        begin_commit: Callable[[RosterEntry], None],
    ) -> Streamed:
        """Send `version` to the replicas among `targets` that accept it, if at least `needed` do.

        An in-place replica writes nothing before its commit begins: `begin_commit` is called once all its ranks are ready.
        Raises `AttemptError`; the caller must then abandon the session.
        """
        offer = self._offer_for(version, targets, deadline)
        receivers = self._connected_of(targets)
        senders = () if version in self._stored else self._roster.publishers
        self._queue.check_present([*senders, *receivers], sending=False)
        accepted, refused = self._open(offer, receivers, deadline)
        entries = [entry for entry in targets if all(name in accepted for name in entry.subscribers)]
        for entry in targets:
            if entry not in entries and entry.name not in refused:
                absent = QuorumError("it is not connected.", part=COORDINATOR, peer=entry.name)
                refused[entry.name] = entry.error or absent
        self._check_refusals(version, entries, refused, needed)
        streamed = Streamed(offer, entries, [], [], refused)
        try:
            self._send(streamed, accepted, deadline, begin_commit)
        except AttemptError as failed:
            raise self._or_in_full(version, failed) from failed
        if self._traits and self._traits.persistent:
            self._stored[version] = offer
        return streamed

    def _send(
        self,
        streamed: Streamed,
        accepted: Mapping[str, Accepted],
        deadline: Deadline,
        begin_commit: Callable[[RosterEntry], None],
    ) -> None:
        """Have the publishers send, unless the version is stored, and add all replies to `streamed`."""
        version, names = streamed.offer.version, _subscribers(streamed.replicas)
        awaited: set[tuple[type[Reply], str]] = {(Staged, name) for name in names}
        awaited |= {(Ready, name) for name in names if accepted[name].in_place}
        if version not in self._stored:
            awaited |= {(Sent, name) for name in self._roster.publishers}
            go = Go(
                session=self.name,
                version=version,
                receivers=names,
                codec=str(streamed.offer.manifest.get("codec", "")),
                times=streamed.offer.times,
                deadline_s=deadline.remaining_s * _PUBLISHER_SHARE,
                stall_s=self._config.stall_s,
            )
            self._queue.post_all(self._roster.publishers, go)
        if _base_of(streamed.offer) is not None:
            self._sent_as_delta.add(version)
        unready = {entry.name: set(entry.subscribers) for entry in streamed.replicas}
        for reply in self._queue.replies(awaited, version, deadline, f"to finish version {version}"):
            if isinstance(reply, Sent):
                streamed.sent.append(reply)
            elif isinstance(reply, Staged):
                streamed.staged.append(reply)
            elif isinstance(reply, Ready) and (owner := self._roster.entry_of(reply.name)):
                unready[owner.name].discard(reply.name)
                if not unready[owner.name]:
                    begin_commit(owner)

    def _connected_of(self, targets: Sequence[RosterEntry]) -> list[str]:
        return [name for name in _subscribers(targets) if name in self._receivers]

    def _offer_for(self, version: int, targets: Sequence[RosterEntry], deadline: Deadline) -> Offer:
        """The offer of `version`: a delta only if all of `targets` have its base."""
        if (offer := self._stored.get(version)) is None:
            self._queue.check_not_failed(version)
            offer = self._offer(version, deadline)
        base = _base_of(offer)
        if base is not None and (version == self._full or any(entry.version != base for entry in targets)):
            if version in self._sent_as_delta and self._traits and self._traits.persistent:
                error = DeltaBaseError(
                    f"version {version} was sent as a delta, and a replica lacks the version that the delta applies to.",
                    part=COORDINATOR,
                    hint="It is sent in full on another connection.",
                )
                raise self._or_in_full(version, AttemptError(error))
            offer = self._offer_in_full(version, deadline)
        return offer

    def _offer(self, version: int, deadline: Deadline) -> Offer:
        leader = self._roster.publishers[0]
        if version not in self._queue.offers:
            self._queue.check_offerable(version, leader)
            self._queue.collect(Offer, [leader], version, deadline, f"to offer version {version}")
        return self._queue.offers[version]

    def _offer_in_full(self, version: int, deadline: Deadline) -> Offer:
        """Have the publishers offer a version in full that they offered as a delta: a replica lacks the delta's base."""
        leader = self._roster.publishers[0]
        self._stored.pop(version, None)
        self._queue.offers.pop(version, None)
        self._queue.check_offerable(version, leader)
        self._queue.post_all(self._roster.publishers, Full(session=self.name, version=version))
        return self._offer(version, deadline)

    def _open(
        self, offer: Offer, names: Sequence[str], deadline: Deadline
    ) -> tuple[dict[str, Accepted], dict[str, WeightlaneError]]:
        """Offer the version to the subscribers `names`. Returns the acceptances, and the errors of replicas that refuse."""
        message = Open(
            session=self.name,
            version=offer.version,
            manifest=offer.manifest,
            deadline_s=deadline.remaining_s * _SUBSCRIBER_SHARE,
            stall_s=self._config.stall_s,
        )
        self._queue.post_all(names, message)
        limit = deadline.within(self._config.stall_s)
        replies, errors = self._queue.collect_some(
            Accepted, names, offer.version, limit, f"to accept version {offer.version}"
        )
        refused = {entry.name: error for name, error in errors.items() if (entry := self._roster.entry_of(name))}
        return {reply.name: reply for reply in replies}, refused

    def _or_in_full(self, version: int, failed: AttemptError) -> AttemptError:
        """Return `failed`. If a replica lacks the base of a delta, return an error with a free retry that sends in full."""
        if not isinstance(failed.error, DeltaBaseError) or version == self._full:
            return failed
        self._full = version
        return AttemptError(failed.error, free_retry=True)

    def _check_refusals(
        self, version: int, accepting: Sequence[RosterEntry], refused: dict[str, WeightlaneError], needed: int
    ) -> None:
        if not refused:
            return
        first = next(iter(refused.values()))
        if baseless := [error for error in refused.values() if isinstance(error, DeltaBaseError)]:
            raise self._or_in_full(version, AttemptError(baseless[0]))
        # A subscriber that accepted waits for buckets. If another rank of its replica refused, it must be interrupted.
        entries = self._roster.entries
        partly = any(len(entries[name].subscribers) > 1 for name in refused if name in entries)
        silent = any(isinstance(error, DeadlineExceededError) for error in refused.values())
        if len(accepting) < needed:
            raise AttemptError(first, final=True)
        if partly or silent or not self._selective:
            raise AttemptError(first, refused)


def _check_plans(connected: Sequence[Connected], roster: Roster) -> None:
    """Raise `AttemptError` unless all participants have computed the same transfer plan; no bytes are sent yet."""
    plans = {message.name: message.plan for message in connected}
    leader = roster.publishers[0]
    agreed = plans.get(leader, next(iter(plans.values()), ""))
    if others := {name: plan for name, plan in plans.items() if plan != agreed}:
        listed = ", ".join(f"{name} {plan}" for name, plan in others.items())
        error = ProtocolError(
            f"the ranks have made different transfer plans: {leader} {agreed}, {listed}.",
            part=COORDINATOR,
            peer=", ".join(others),
            hint="Run one release of weightlane on all ranks, with the same checkpoint engine.",
        )
        culprits = roster.replicas_of(others)
        raise AttemptError(error, culprits, final=len(culprits) < len(others))


def _subscribers(entries: Iterable[RosterEntry]) -> list[str]:
    return [name for entry in entries for name in entry.subscribers]


def _base_of(offer: Offer) -> int | None:
    """The version that a delta applies to; None for a version in full."""
    base: int | None = offer.manifest.get("base_version")
    return base
