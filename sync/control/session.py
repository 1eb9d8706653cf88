"""One connection of trainers and rollouts after another, and the streaming of versions over it."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from weightlane.ckpt_engines import (
    Deadline,
    DeadlineExceededError,
    DeltaBaseError,
    ProtocolError,
    QuorumError,
    WeightlaneError,
)

from ..codecs.quantised import QuantisationReport
from ..config import SyncConfig
from .message_queue import MessageQueue, Reply, TroubleError
from .messages import Accepted, Connect, Connected, EngineTraits, Full, Go, Hello, Offer, Open, Ready, Sent, Staged
from .roster import Roster, RosterEntry

# Whoever is closest to the cause of a stall gives up first, so that the reason everybody gets names the right peer.
_PUBLISHER_SHARE = 0.9
_SUBSCRIBER_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Streamed:
    """A version that `members` have complete: in their staging memory, or already written into their weights."""

    offer: Offer
    members: list[RosterEntry]
    sent: list[Sent]
    staged: list[Staged]
    refused: dict[str, WeightlaneError]
    """Replicas that did not accept it, with the reason."""

    @property
    def quantisation(self) -> QuantisationReport | None:
        """What quantising has done, over all trainer ranks."""
        errors = [QuantisationReport(*message.error) for message in self.sent if message.error is not None]
        return sum(errors, QuantisationReport()) if errors else None


class Session:
    """What the publishers and the subscribers are connected by at present. Used by one thread at a time."""

    def __init__(self, letters: MessageQueue, roster: Roster, config: SyncConfig) -> None:
        self._letters = letters
        self._roster = roster
        self._config = config
        self._senders: dict[str, dict[str, Any]] = {}
        self._receivers: dict[str, dict[str, Any]] = {}
        """Address of every connected subscriber."""
        self._traits: EngineTraits | None = None
        self._relayed = False
        """Whether in the present session subscribers hand on to others what they get."""
        self._stored: dict[int, Offer] = {}
        """Versions that were sent in full and can be read again without the sender."""
        self._as_delta: set[int] = set()
        """Versions that were sent as deltas in this session: what a store has of them must not be taken for the whole."""
        self._full = -1
        """The version that somebody refused as a delta."""
        self._up = False

    @property
    def session(self) -> str:
        """Name of the present connection, or of the last one."""
        return self._letters.session

    def give_up(self) -> None:
        """The connection is not to be used any more."""
        self._up = False

    def ensure(self, targets: Sequence[RosterEntry], deadline: Deadline, *, everyone: bool = False) -> None:
        """See to it that `targets` can be sent to, by as little new connecting as the engine allows.

        With `everyone` nobody may be missing; else replicas that do not answer are marked as lost, and the others go on.
        """
        self._letters.catch_up()
        wanted = _names(self._roster.reachable() if self._selective else targets)
        alive = self._up and not self._letters.stale
        if alive and self._traits and self._traits.elastic:
            if newcomers := [name for name in _names(targets) if not self._connected(name)]:
                self._attach(newcomers, deadline)
        elif not alive or {name for name in self._receivers if self._connected(name)} != set(wanted):
            self._connect(wanted, deadline, everyone=everyone)
            # Who hands on to whom is known now, and so whether somebody has to be there who is not to get the version.
            ours = self._receivers_of(targets)
            if not self._selective and len(ours) < len(self._receivers):
                self._connect(ours, deadline, everyone=False)

    @property
    def _selective(self) -> bool:
        """Whether some of a session's receivers can be sent to without the others; it is so until the contrary is known."""
        return (self._traits is None or self._traits.selective) and not self._relayed

    def _connected(self, name: str) -> bool:
        return name in self._receivers and not self._letters.is_gone(name)

    def _connect(self, subscribers: Sequence[str], deadline: Deadline, *, everyone: bool) -> None:
        self._up = False
        publishers = list(self._roster.publishers)
        self._letters.wait_for_joined(publishers, deadline)
        session = f"s-{secrets.token_hex(6)}"
        self._letters.begin(session, [*publishers, *subscribers])  # which ends the one before
        self._stored.clear()
        self._as_delta.clear()
        self._letters.collect(Hello, publishers, -1, deadline, "to answer")
        leader = self._letters.hellos[publishers[0]]
        self._senders, self._traits = {leader.name: leader.address}, leader.traits
        limit = deadline if everyone else deadline.within(self._config.rejoin_s)
        greeted = self._present(subscribers, limit, everyone=everyone)
        self._receivers = {name: hello.address for name, hello in greeted.items()}
        self._introduce([*publishers, *self._receivers], deadline)
        self._up = True

    def _attach(self, newcomers: Sequence[str], deadline: Deadline) -> None:
        """Connect further receivers to what is there; the others do not notice."""
        for name in newcomers:
            self._receivers.pop(name, None)
        self._letters.invite(newcomers)
        greeted = self._present(newcomers, deadline.within(self._config.rejoin_s))
        self._receivers |= {name: hello.address for name, hello in greeted.items()}
        self._introduce(list(greeted), deadline)

    def _present(self, subscribers: Sequence[str], deadline: Deadline, *, everyone: bool = False) -> dict[str, Hello]:
        """Those who answer. A replica of which somebody does not is lost; with `everyone`, `TroubleError` is raised."""
        silent = [name for name in subscribers if name not in self._letters.hellos]
        _, errors = self._letters.answers(Hello, silent, -1, deadline, "to answer")
        if everyone:
            self._letters.check_present(subscribers, sending=False)
            for error in errors.values():
                raise TroubleError(error)
        for name, error in errors.items():
            # One that was started anew meanwhile has not been asked yet.
            if not self._letters.is_gone(name) and (member := self._roster.owner(name)):
                self._roster.lost(member, error)
        return {
            name: self._letters.hellos[name]
            for name in subscribers
            if (owner := self._roster.owner(name)) and all(other in self._letters.hellos for other in owner.names)
        }

    def _introduce(self, names: Sequence[str], deadline: Deadline) -> None:
        greeted = {name: self._letters.hellos[name] for name in self._receivers if name in self._letters.hellos}
        message = Connect(
            session=self.session,
            publishers=list(self._roster.publishers),
            senders=self._senders,
            receivers=self._receivers,
            # In the roster's order, not in that of answers: the same ranks make the same plan in every session.
            needs={name: hello.need for name, hello in greeted.items()},
            relays=all(hello.relays for hello in greeted.values()),
            deadline_s=deadline.within(self._config.connect_timeout_s).remaining_s * _SUBSCRIBER_SHARE,
        )
        self._letters.post_all(names, message)
        connected = self._letters.collect(Connected, names, -1, deadline, "to connect")
        _check_plans(connected, self._roster)
        self._relayed = any(message.relays for message in connected)

    def stream(
        self,
        version: int,
        targets: Sequence[RosterEntry],
        needed: int,
        deadline: Deadline,
        begin: Callable[[RosterEntry], None],
    ) -> Streamed:
        """Carry `version` into the staging memory of `targets`, or of those who accept it if they are at least `needed`.

        A replica that takes it in place has to begin its commit meanwhile, else nothing is written: `begin` is called with it
        when all its ranks are ready. Raises `TroubleError`; the connection is not usable any more then.
        """
        if (offer := self._stored.get(version)) is None:
            self._letters.check_failed(version)
            offer = self._offer(version, deadline)
        base = offer.manifest.get("base_version")
        if base is not None and (version == self._full or any(member.version != base for member in targets)):
            if version in self._as_delta and self._traits and self._traits.persistent:
                raise self._without_delta(version, TroubleError(_sent_as_delta(version)))
            offer = self._offer_in_full(version, deadline)
            base = None
        receivers = self._receivers_of(targets)
        senders = () if version in self._stored else self._roster.publishers
        self._letters.check_present([*senders, *receivers], sending=False)
        accepting, in_place, refused = self._open(offer, receivers, deadline)
        members = [member for member in targets if all(name in accepting for name in member.names)]
        for member in targets:
            if member not in members and member.name not in refused:
                refused[member.name] = member.error or _unreachable(member)
        self._check_refusals(version, members, refused, needed)
        names = _names(members)
        awaited: set[tuple[type[Reply], str]] = {(Staged, name) for name in names}
        awaited |= {(Ready, name) for name in names if name in in_place}
        if version not in self._stored:
            awaited |= {(Sent, name) for name in self._roster.publishers}
            go = Go(
                session=self.session,
                version=version,
                receivers=names,
                codec=str(offer.manifest.get("codec", "")),
                deadline_s=deadline.remaining_s * _PUBLISHER_SHARE,
                stall_s=self._config.stall_s,
            )
            self._letters.post_all(self._roster.publishers, go)
        if base is not None:
            self._as_delta.add(version)
        try:
            heard = _Beginning(members, begin)
            replies = self._letters.gather(awaited, version, deadline, f"to finish version {version}", heard)
        except TroubleError as trouble:
            raise self._without_delta(version, trouble) from trouble
        if self._traits and self._traits.persistent:
            self._stored[version] = offer
        sent = [message for message in replies if isinstance(message, Sent)]
        staged = [message for message in replies if isinstance(message, Staged)]
        return Streamed(offer, members, sent, staged, refused)

    def _receivers_of(self, targets: Sequence[RosterEntry]) -> list[str]:
        return [name for name in _names(targets) if name in self._receivers]

    def _offer(self, version: int, deadline: Deadline) -> Offer:
        leader = self._roster.publishers[0]
        if version not in self._letters.offers:
            self._letters.check_held(version, leader)
            self._letters.collect(Offer, [leader], version, deadline, f"to offer version {version}")
        return self._letters.offers[version]

    def _offer_in_full(self, version: int, deadline: Deadline) -> Offer:
        """Have a version that was offered as a delta offered once more: somebody lacks its base."""
        leader = self._roster.publishers[0]
        self._stored.pop(version, None)
        self._letters.offers.pop(version, None)
        self._letters.check_held(version, leader)
        self._letters.post_all(self._roster.publishers, Full(session=self.session, version=version))
        self._letters.collect(Offer, [leader], version, deadline, f"to offer version {version} in full")
        return self._letters.offers[version]

    def _open(
        self, offer: Offer, names: Sequence[str], deadline: Deadline
    ) -> tuple[set[str], set[str], dict[str, WeightlaneError]]:
        """Offer the version to subscribers. Who accepts, who of them takes it in place, and which replicas do not accept."""
        message = Open(
            session=self.session,
            version=offer.version,
            manifest=offer.manifest,
            deadline_s=deadline.remaining_s * _SUBSCRIBER_SHARE,
            stall_s=self._config.stall_s,
        )
        self._letters.post_all(names, message)
        limit = deadline.within(self._config.stall_s)
        replies, errors = self._letters.answers(
            Accepted, names, offer.version, limit, f"to accept version {offer.version}"
        )
        refused = {owner.name: error for name, error in errors.items() if (owner := self._roster.owner(name))}
        in_place = {reply.name for reply in replies if reply.in_place}
        return {reply.name for reply in replies}, in_place, refused

    def _without_delta(self, version: int, trouble: TroubleError) -> TroubleError:
        """The trouble, or if somebody lacked the base of a delta, that the version is to be sent in full at the next try."""
        if not isinstance(trouble.error, DeltaBaseError) or version == self._full:
            return trouble
        self._full = version
        return TroubleError(trouble.error, again=True)

    def _check_refusals(
        self, version: int, members: Sequence[RosterEntry], refused: dict[str, WeightlaneError], needed: int
    ) -> None:
        if not refused:
            return
        first = next(iter(refused.values()))
        if baseless := [error for error in refused.values() if isinstance(error, DeltaBaseError)]:
            raise self._without_delta(version, TroubleError(baseless[0]))
        # Whoever accepted and shares the replica of one that refused waits for buckets: it must be interrupted.
        partly = any(len(self._roster.members[name].names) > 1 for name in refused if name in self._roster.members)
        silent = any(isinstance(error, DeadlineExceededError) for error in refused.values())
        if len(members) < needed:
            raise TroubleError(first, hopeless=True)
        if partly or silent or not self._selective:
            raise TroubleError(first, refused)


def _check_plans(connected: Sequence[Connected], roster: Roster) -> None:
    """`TroubleError` unless all have worked out the same transfer plan; no byte has moved yet."""
    plans = {message.name: message.plan for message in connected}
    leader = roster.publishers[0]
    agreed = plans.get(leader, next(iter(plans.values()), ""))
    if others := {name: plan for name, plan in plans.items() if plan != agreed}:
        said = ", ".join(f"{name} {plan or 'none'}" for name, plan in others.items())
        error = ProtocolError(
            f"the ranks have made different transfer plans: {leader} {agreed or 'none'}, {said}.",
            part="coordinator",
            peer=", ".join(others),
            hint="Run one release of weightlane on all ranks, with the same checkpoint engine.",
        )
        owners = {member.name for name in others if (member := roster.owner(name))}
        raise TroubleError(error, owners, hopeless=len(owners) < len(others))


class _Beginning:
    """Tells when all ranks of a replica are ready to take a version in place."""

    def __init__(self, members: Sequence[RosterEntry], begin: Callable[[RosterEntry], None]) -> None:
        self._waiting = {member.name: (member, set(member.names)) for member in members}
        self._begin = begin

    def __call__(self, reply: Reply) -> None:
        if not isinstance(reply, Ready):
            return
        for member, names in self._waiting.values():
            if reply.name in names:
                names.discard(reply.name)
                if not names:
                    self._begin(member)


def _names(members: Iterable[RosterEntry]) -> list[str]:
    return [name for member in members for name in member.names]


def _sent_as_delta(version: int) -> DeltaBaseError:
    return DeltaBaseError(
        f"version {version} was sent as a delta, and somebody lacks what it applies to.",
        part="coordinator",
        hint="It is sent in full on another connection.",
    )


def _unreachable(member: RosterEntry) -> QuorumError:
    return QuorumError("it is not connected.", part="coordinator", peer=member.name)
