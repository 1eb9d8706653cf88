"""Routes and links: the hops of a lane to its receivers, the engine's connections, and the order of buckets on each."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from weightlane.ckpt_engines import Capabilities, ConfigError, Delivery

from ..config import Relay
from ..version.manifest import Manifest
from .transfer_plan import TransferPlan

_FAN_OUTS = {"chain": 1, "tree": 2}
"""Number of ranks to which each rank sends a relayed lane."""

_LEAST_SHARE = 0.1
"""Least share of a receiver's bytes for which a collective engine opens a communicator, which takes memory on the device."""


@dataclass(frozen=True, slots=True)
class Route:
    """The hops of one lane, as pairs of sender and receiver. A rank receives a lane in an earlier hop than it relays it."""

    hops: tuple[tuple[str, str], ...]

    @property
    def relayed(self) -> bool:
        """Whether a receiver relays."""
        return len({sender for sender, _ in self.hops}) > 1

    def next_after(self, name: str) -> tuple[str, ...]:
        """The ranks that a rank sends the lane to."""
        return tuple(receiver for sender, receiver in self.hops if sender == name)

    def hops_to(self, name: str) -> int:
        """Number of hops from the sender to a rank."""
        before = {receiver: sender for sender, receiver in self.hops}
        count = 0
        while (sender := before.get(name)) is not None:
            name, count = sender, count + 1
        return count


def plan_routes(plan: TransferPlan, relay: Relay) -> tuple[Route, ...]:
    """Plan a route for each lane, equal in every process.

    A lane with more receivers than the fan-out of `relay` is relayed. Lanes with the same receivers begin at different receivers,
    so that all of them relay about as many bytes.
    """
    turns: Counter[tuple[str, ...]] = Counter()
    routes = []
    for lane in plan.lanes:
        receivers = lane.receivers
        fan_out = _FAN_OUTS.get(relay, len(receivers))
        if fan_out < len(receivers):
            relays = (len(receivers) - 1) // fan_out  # the first ranks relay; in the next lane, the ranks after them do
            first = turns[receivers] * relays % len(receivers)
            turns[receivers] += 1
            receivers = receivers[first:] + receivers[:first]
        ranks = (lane.sender, *receivers)  # rank n receives from rank (n - 1) // fan_out, as in a heap
        routes.append(Route(tuple((ranks[(n - 1) // fan_out], ranks[n]) for n in range(1, len(ranks)))))
    return tuple(routes)


def check_relay(relay: Relay, engine: str, facts: Capabilities) -> None:
    """Raise `ConfigError` if receivers of the engine named `engine` cannot relay, or if relaying would only cost time.

    Relays are impossible if a send reaches every receiver, or if buckets stay in a store or in their sender's memory. They cost
    time within one host, where memory is the bottleneck and not the network cards.
    """
    elsewhere = facts.views or facts.persistent or facts.elastic or facts.same_host_only
    if relay != "off" and (elsewhere or Delivery.POINT_TO_POINT not in facts.delivery):
        raise ConfigError(
            f"sync.relay is {relay}, and receivers of {engine} cannot relay.",
            part="transfer plan",
            hint='Set sync.relay to "off", or checkpoint_engine.backend to an engine between hosts, such as gloo or nixl.',
        )


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """One connection of the engine: its senders, their receivers, and the lanes on it.

    A sender is the trainer rank whose lanes it sends, or a rollout rank that relays them. A link has several senders only if the
    engine is collective. No rank is both a sender and a receiver of the same link.
    """

    number: int
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    lanes: Mapping[str, tuple[int, ...]]
    """The lanes of each sender, in the order in which it sends them."""
    receiver_sets: tuple[tuple[str, ...], ...] = ()
    """Sets of receivers of which only one gets each bucket from its sender, and passes it on to the others."""

    def session(self, session: str) -> str:
        """Name of the engine's session for this link."""
        return f"{session}-{self.number}"

    def turns(self, sent: Manifest) -> Iterator[Turn]:
        """Every bucket of the version `sent` on this link, in the order that all its ranks follow.

        Senders take turns, one bucket each, so that no sender waits until another has sent everything.
        """
        queues = [
            [(lane, index) for lane in self.lanes[sender] for index in sent.buckets_of(lane)] for sender in self.senders
        ]
        for number, turn in enumerate(itertools.zip_longest(*queues)):
            for sender, bucket in zip(self.senders, turn, strict=True):
                if bucket is not None:
                    yield Turn(number, sender, *bucket)


class Turn(NamedTuple):
    """A bucket on a link."""

    number: int
    """Number of the turn."""
    sender: str
    lane: int
    sent_as: int
    """Index of the bucket in the manifest of the version as sent."""


def links_of(plan: TransferPlan, routes: Sequence[Route], *, apart: bool) -> list[PlannedLink]:
    """The links of an engine that is not collective: one for each sending rank and each trainer rank whose lanes it sends.

    A relay therefore does not hold up the lanes of one trainer rank for those of another. With `apart`, for engines whose sends
    reach every receiver of a connection, each set of receivers has its own link as well.
    """
    found: dict[tuple[str, str, tuple[str, ...]], tuple[dict[str, None], dict[int, None]]] = {}
    for number, (lane, route) in enumerate(zip(plan.lanes, routes, strict=True)):
        for sender, receiver in route.hops:
            key = sender, lane.sender, lane.receivers if apart else ()
            receivers, lanes = found.setdefault(key, ({}, {}))
            receivers[receiver] = lanes[number] = None
    return [
        PlannedLink(number, (sender,), tuple(receivers), {sender: tuple(lanes)})
        for number, ((sender, *_), (receivers, lanes)) in enumerate(found.items())
    ]


@dataclass(slots=True)
class _CollectiveGroup:
    """Senders at the same number of hops from the trainer that share a link."""

    hops: int
    lanes: dict[str, dict[int, None]]
    """Lanes by sender."""
    receivers: dict[str, dict[str, None]]
    """Receivers by sender."""

    @property
    def reached(self) -> set[str]:
        return {name for names in self.receivers.values() for name in names}

    @property
    def first_lane(self) -> int:
        return min(lane for lanes in self.lanes.values() for lane in lanes)

    def can_join(self, other: _CollectiveGroup) -> bool:
        """Whether no rank would be a sender and a receiver of one link."""
        return not (self.lanes.keys() & other.reached or other.lanes.keys() & self.reached)

    def joined(self, other: _CollectiveGroup) -> _CollectiveGroup:
        return _CollectiveGroup(self.hops, self.lanes | other.lanes, self.receivers | other.receivers)


def collective_links(plan: TransferPlan, routes: Sequence[Route]) -> list[PlannedLink]:
    """The links of a collective engine: one for each group of senders with common receivers, at each number of hops.

    A rank relays on another link than it receives on, because a link has one order of buckets and a bucket must arrive before it
    is relayed. So no link waits for one that is further from the trainer.
    """
    single: dict[tuple[int, str], _CollectiveGroup] = {}
    for number, route in enumerate(routes):
        for sender, receiver in route.hops:
            hops = route.hops_to(sender)
            group = single.setdefault((hops, sender), _CollectiveGroup(hops, {sender: {}}, {sender: {}}))
            group.receivers[sender][receiver] = group.lanes[sender][number] = None
    groups: list[_CollectiveGroup] = []
    for new in single.values():
        reached, merged = new.reached, new
        for index in reversed(range(len(groups))):
            group = groups[index]
            if group.hops == new.hops and group.reached & reached and group.can_join(merged):
                merged = groups.pop(index).joined(merged)
        groups.append(merged)
    sets = () if any(route.relayed for route in routes) else _receiver_sets(plan)
    links = []
    for number, group in enumerate(sorted(groups, key=lambda group: group.first_lane)):
        senders = sorted(group.lanes, key=lambda sender: min(group.lanes[sender]))
        receivers = dict.fromkeys(name for sender in senders for name in group.receivers[sender])
        lanes = {sender: tuple(sorted(group.lanes[sender])) for sender in senders}
        own = tuple(members for members in sets if receivers.keys() >= set(members))
        if len(lanes) == 1:  # then those for all receivers are broadcast
            own = tuple(members for members in own if len(members) < len(receivers))
        links.append(PlannedLink(number, tuple(lanes), tuple(receivers), lanes, own))
    return links


def _receiver_sets(plan: TransferPlan) -> tuple[tuple[str, ...], ...]:
    """The sets of two or more receivers of lanes that carry at least a share of `_LEAST_SHARE` of a member's bytes.

    The share limits the communicators of a receiver to ten.
    """
    together: Counter[tuple[str, ...]] = Counter()
    received: Counter[str] = Counter()
    for lane in plan.lanes:
        together[lane.receivers] += lane.nbytes
        received.update(dict.fromkeys(lane.receivers, lane.nbytes))
    return tuple(
        members
        for members, nbytes in together.items()
        if len(members) > 1 and all(nbytes >= _LEAST_SHARE * received[name] > 0 for name in members)
    )
