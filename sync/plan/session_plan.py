"""What everybody in a session works out alike: which slices of which tensors go from whom to whom, and as which stream.

The trainer ranks say what each of them sends, the rollout ranks what they need (`PlanExchange`). From that every participant
makes the same transfer plan, and the same routes for its lanes; the digests are compared before the first byte moves.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from weightlane.ckpt_engines import Capabilities, ConfigError, Deadline, Delivery, ProtocolError

from ..codecs.quantised.quantisation import checked_scheme
from ..codecs.quantised.quantised_needs import needed_on_the_wire
from ..config import Network
from ..version.manifest import Manifest, Slicing
from ..version.placement import Placement
from ..version.tensor_spec import TensorSlice, TensorSpec
from .routes import Route, plan_routes, straight
from .transfer_plan import TransferPlan, plan_transfer

_PART = "transfer plan"
WHOLE = ""
"""What a rollout rank says that needs all of every tensor."""


class PlanMailbox(Protocol):
    """A mailbox of the session."""

    def put(self, key: str, value: Any) -> None:
        """As `Mailbox.put`."""

    def get(self, key: str, deadline: Deadline) -> Any:
        """As `Mailbox.get`."""


@dataclass(frozen=True)
class Supply:
    """What the trainer ranks send, and how.

    Attributes:
        shares: Of each rank's publisher, in rank order, the slices that it sends; together every element once.
        bucket_bytes: Payload of a bucket.
        checksummed: As in `Manifest`.
        quantised: As in `Manifest`.
        network: What links are said to carry, by which routes are chosen; None to have nobody hand anything on.
    """

    shares: Mapping[str, Placement]
    bucket_bytes: int
    checksummed: bool
    quantised: str
    network: Network | None = None

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor."""
        return tuple({spec.name: spec for share in self.shares.values() for spec in share.specs}.values())

    @cached_property
    def whole(self) -> Placement:
        """All of it."""
        return Placement.whole(self.specs)

    def said_of_it(self, needed: Placement) -> Placement | None:
        """`needed`, which may speak of other types, or of the tensors as they are restored, said of what is sent.

        None if it is of other tensors.
        """
        sent = {spec.name: spec for spec in self.specs}
        if sent.keys() == {spec.name for spec in needed.specs} and all(
            sent[spec.name].stands_for(spec) for spec in needed.specs
        ):
            return Placement(tuple(sent[spec.name] for spec in needed.specs), needed.boxes)
        return needed_on_the_wire(needed, self.specs, checked_scheme(self.quantised)) if self.quantised else None

    def to_plain(self) -> list[Any]:
        """As JSON."""
        shares = [[name, share.to_plain()] for name, share in self.shares.items()]
        network = self.network
        links = network and [network.sender_bytes_per_s, network.receiver_bytes_per_s, network.latency_s]
        return [shares, self.bucket_bytes, self.checksummed, self.quantised, links]

    @classmethod
    def from_plain(cls, plain: Any) -> Supply:
        """Parse what rank 0 said; `ProtocolError` for anything else."""
        match plain:
            case [[*shares], int() as bucket_bytes, bool() as checksummed, str() as quantised, links]:
                if all(isinstance(pair, list) and len(pair) == 2 for pair in shares):  # noqa: PLR2004 - name and share
                    pairs = [(str(name), Placement.from_plain(share)) for name, share in shares]
                    return cls(dict(pairs), bucket_bytes, checksummed, quantised, _network(links, bucket_bytes))
        raise ProtocolError("not what trainer ranks send.", part=_PART)


def _network(plain: Any, bucket_bytes: int) -> Network | None:
    match plain:
        case None:
            return None
        case [float() as sender, float() as receiver, float() as latency_s] if all(map(math.isfinite, plain)):
            try:
                return Network(sender, receiver, latency_s, bucket_bytes)
            except ConfigError as error:
                raise ProtocolError(f"not what links carry: {error.message}", part=_PART) from error
    raise ProtocolError("not what links carry.", part=_PART)


class PlanExchange:
    """Where a session's participants say what they have and need.

    Args:
        board: Private to the session.
    """

    def __init__(self, board: PlanMailbox) -> None:
        self._board = board

    def supply(self, supply: Supply) -> None:
        """[rank 0 of the trainers] Say what is sent."""
        self._board.put("supply", supply.to_plain())

    def need(self, needed: Placement | None) -> str:
        """[rollout ranks] Say what is needed. Returns the key under which others find it, the same for replicas of a rank."""
        if needed is None:
            return WHOLE
        self._board.put(f"need/{needed.digest}", needed.to_plain())
        return needed.digest

    def supplied(self, deadline: Deadline) -> Supply:
        """What is sent. Raises `DeadlineExceededError` or `ProtocolError`."""
        return Supply.from_plain(self._board.get("supply", deadline))

    def needed(self, keys: Mapping[str, str], supply: Supply, deadline: Deadline) -> dict[str, Placement]:
        """What each rollout rank needs of what is sent, by its name. Raises as `supplied`.

        Of a quantised version a rank may have said it of the tensors as they are sent, or as they are restored. Whoever has said
        it of others gets everything: it finds out anew then what it needs, or refuses.
        """
        known: dict[str, Placement] = {WHOLE: supply.whole}
        for key in keys.values():
            if key not in known:
                needed = Placement.from_plain(self._board.get(f"need/{key}", deadline))
                known[key] = supply.said_of_it(needed) or supply.whole
        return {name: known[key] for name, key in keys.items()}


@dataclass(frozen=True, slots=True)
class PlannedLink:
    """One connection of the engine: its senders, their receivers, and the lanes that go through it.

    A sender is the trainer rank whose lanes these are, or a rollout rank that hands them on. There is one, unless the engine is a
    collective one. Nobody is a sender and a receiver of the same link.
    """

    number: int
    senders: tuple[str, ...]
    receivers: tuple[str, ...]
    lanes: Mapping[str, tuple[int, ...]]
    """By sender, in the order in which it sends them."""

    def session(self, session: str) -> str:
        """Name of the engine's own session."""
        return f"{session}-{self.number}"

    def turns(self, sent: Manifest) -> Iterator[Turn]:
        """Every bucket of the version `sent` that goes through it, in the order that all its members keep.

        The senders take turns, one bucket each, so that none waits for another to have sent everything.
        """
        queues = [
            [(lane, index) for lane in self.lanes[sender] for index in sent.buckets_of(lane)] for sender in self.senders
        ]
        for turn in itertools.zip_longest(*queues):
            for sender, place in zip(self.senders, turn, strict=True):
                if place is not None:
                    yield Turn(sender, *place)


class Turn(NamedTuple):
    """A bucket on a link."""

    sender: str
    lane: int
    sent_as: int
    """Its index in the version as it is sent."""


def can_relay(facts: Capabilities) -> bool:
    """Whether an engine's receivers can hand on what they get, and anything be gained by it.

    Where a send reaches everybody, or buckets stay in a store or in their sender's memory, there is nothing to hand on; within
    one host no network card is short, but memory.
    """
    elsewhere = facts.views or facts.persistent or facts.elastic or facts.same_host_only
    return Delivery.POINT_TO_POINT in facts.delivery and not elsewhere


class SessionPlan:
    """Of one session.

    Args:
        supply: What the trainer ranks send.
        needed: What each rollout rank needs.
        facts: Capabilities of the engine.
        may_relay: Whether every rollout rank could hand on what it gets.
    """

    def __init__(
        self, supply: Supply, needed: Mapping[str, Placement], facts: Capabilities, *, may_relay: bool = False
    ) -> None:
        # Each rollout rank compares what is sent with its model, and says itself what it lacks.
        names = {spec.name for spec in supply.specs}
        self.plan: TransferPlan = plan_transfer(
            supply.shares, needed, cut="shares" if facts.views else "exact", unused=names
        )
        self.specs = self.plan.specs
        """Every tensor of the checkpoint, as it is sent."""
        cells = [cell for lane in self.plan.lanes for cell in lane.cells]
        regions = tuple(TensorSlice(self.specs[cell.tensor], cell.box) for cell in cells)
        self.layout = Manifest(
            0,
            tuple(region.as_tensor for region in regions),
            supply.bucket_bytes,
            checksummed=supply.checksummed,
            lasting=facts.views,
            quantised=supply.quantised,
            slicing=Slicing(self.plan.digest, self.specs, regions),
            sections=tuple(len(lane.cells) for lane in self.plan.lanes),
        )
        """The stream: every lane is a section of it."""
        self.routes: tuple[Route, ...] = straight(self.plan)
        """How each lane travels."""
        if may_relay and supply.network is not None and can_relay(facts):
            self.routes = plan_routes(self.plan, supply.network, may_relay=True)
        if facts.collective:
            self.links = _collective_links(self.plan, self.routes)
        else:
            self.links = _links(self.plan, self.routes, apart=Delivery.POINT_TO_POINT not in facts.delivery)

    @cached_property
    def digest(self) -> str:
        """What two participants must have in common: the transfer plan, and by which way each lane goes."""
        hops = [route.hops for route in self.routes]
        return hashlib.sha256(repr((self.plan.digest, hops)).encode()).hexdigest()[:16]

    @property
    def relays(self) -> bool:
        """Whether some rank gets what another one hands on."""
        return any(route.depth > 1 for route in self.routes)

    def sent_by(self, name: str) -> list[PlannedLink]:
        """The links through which a rank sends."""
        return [link for link in self.links if name in link.senders]

    def received_by(self, name: str) -> list[PlannedLink]:
        """The links through which a rollout rank receives."""
        return [link for link in self.links if name in link.receivers]

    def lanes_to(self, name: str, link: PlannedLink, sender: str) -> list[int]:
        """The lanes that go from `sender` to a rollout rank through a link."""
        return [lane for lane in link.lanes[sender] if (sender, name) in self.routes[lane].hops]


def _links(plan: TransferPlan, routes: Sequence[Route], *, apart: bool) -> list[PlannedLink]:
    """One for each rank that sends and each trainer rank whose lanes it sends, none of which waits for another's.

    Where every send reaches everybody in a connection (`apart`), one for each set of receivers, too.
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


def _collective_links(plan: TransferPlan, routes: Sequence[Route]) -> list[PlannedLink]:
    """As few as there are groups of ranks that are independent of each other, at each number of hops from the trainer.

    What a rank hands on goes through another link than what it gets: it can be handed on only when it has come, and one link
    has one order. So no link waits for one that is further from the trainer.
    """
    # What each rank sends after so many hops: its receivers, and the lanes.
    found: dict[tuple[int, str], tuple[dict[str, None], dict[int, None]]] = {}
    for number, (_, route) in enumerate(zip(plan.lanes, routes, strict=True)):
        for sender, receiver in route.hops:
            receivers, lanes = found.setdefault((route.hops_to(sender), sender), ({}, {}))
            receivers[receiver] = lanes[number] = None
    groups: list[dict[tuple[int, str], tuple[dict[str, None], dict[int, None]]]] = []
    for key, (receivers, lanes) in found.items():
        hops, sender = key
        touched: list[int] = []
        for place, group in enumerate(groups):
            senders = {other for _, other in group}
            reached = {name for names, _ in group.values() for name in names}
            same = next(iter(group))[0] == hops
            if same and not receivers.keys() & senders and sender not in reached and receivers.keys() & reached:
                touched.append(place)
        merged = {key: (receivers, lanes)}
        for place in reversed(touched):
            senders = {other for _, other in merged}
            reached = {name for names, _ in merged.values() for name in names}
            group = groups[place]
            if not ({name for names, _ in group.values() for name in names} & senders) and not (
                {other for _, other in group} & reached
            ):
                merged = {**groups.pop(place), **merged}
        groups.append(merged)
    links = []
    for number, group in enumerate(sorted(groups, key=lambda group: min(min(lanes) for _, lanes in group.values()))):
        ordered = sorted(group.items(), key=lambda item: min(item[1][1]))
        receivers = dict.fromkeys(name for _, (names, _) in ordered for name in names)
        lanes_of = {sender: tuple(sorted(lanes)) for (_, sender), (_, lanes) in ordered}
        links.append(PlannedLink(number, tuple(lanes_of), tuple(receivers), lanes_of))
    return links
