"""Routes: how a lane reaches all of its receivers, directly from the sender or relayed from one receiver to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..config import Network
from .transfer_plan import Lane, TransferPlan

Kind = Literal["star", "chain", "tree"]
_FAN_OUTS = (1, 2, 3, 4)
"""Fan-outs among which a relayed lane gets the fastest: 1 is a chain, the others are trees."""


@dataclass(frozen=True, slots=True)
class Route:
    """The hops of one lane.

    Attributes:
        kind: ``"star"`` if the sender sends to every receiver; otherwise receivers relay each bucket when it has arrived.
        hops: Sender and receiver of each hop; a rank relays only what an earlier hop has brought.
        depth: Hops from the sender to the last receiver.
    """

    kind: Kind
    hops: tuple[tuple[str, str], ...]
    depth: int

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


def plan_routes(plan: TransferPlan, network: Network, *, may_relay: bool) -> tuple[Route, ...]:
    """Plan a route for each lane, equal in every process.

    No lane is relayed while no sender's network card is the bottleneck. A sender with more to send than the busiest receiver has
    to receive has each of its lanes relayed, if that is faster: long lanes in a chain, short ones in a tree. (Relaying only
    enough lanes to take the sender below the bottleneck was slower, because receivers wait while the sender sends the others to
    everybody.) Lanes with the same receivers begin with another one each time, so that all relay about as much.

    Args:
        plan: The plan.
        network: Speeds of the network cards.
        may_relay: Whether receivers can send, which depends on the engine and on the memory of their hosts.
    """
    if not may_relay:
        return direct_routes(plan)
    turns: Counter[tuple[str, ...]] = Counter()
    routes = []
    for lane, fan_out in zip(plan.lanes, _fan_outs(plan, network), strict=True):
        if not fan_out:
            routes.append(_star(lane))
            continue
        turn = turns[lane.receivers] % len(lane.receivers)
        turns[lane.receivers] += 1
        routes.append(_relayed(lane.sender, lane.receivers[turn:] + lane.receivers[:turn], fan_out))
    return tuple(routes)


def direct_routes(plan: TransferPlan) -> tuple[Route, ...]:
    """Routes without a relay."""
    return tuple(map(_star, plan.lanes))


def _star(lane: Lane) -> Route:
    return Route("star", tuple((lane.sender, receiver) for receiver in lane.receivers), 1)


def _fan_outs(plan: TransferPlan, network: Network) -> list[int]:
    """For each lane the number of receivers that each of its ranks sends to; 0 for a star."""
    sent: Counter[str] = Counter()
    once: Counter[str] = Counter()
    received: Counter[str] = Counter()
    own: dict[str, list[int]] = {}
    for number, (lane, nbytes) in enumerate(zip(plan.lanes, plan.lane_bytes, strict=True)):
        sent[lane.sender] += nbytes * len(lane.receivers)
        once[lane.sender] += nbytes
        own.setdefault(lane.sender, []).append(number)
        for receiver in lane.receivers:
            received[receiver] += nbytes
    bound_s = max(
        max(received.values(), default=0) / network.receiver_bytes_per_s,
        max(once.values(), default=0) / network.sender_bytes_per_s,
    )
    fan_outs = [0] * len(plan.lanes)
    for sender, lanes in own.items():
        if sent[sender] / network.sender_bytes_per_s <= bound_s:
            continue
        for number in lanes:
            receivers, nbytes = len(plan.lanes[number].receivers), plan.lane_bytes[number]
            fan_out = min(_FAN_OUTS, key=lambda each: _relayed_s(nbytes, receivers, each, network))
            star_s = receivers * nbytes / network.sender_bytes_per_s
            if fan_out < receivers and _relayed_s(nbytes, receivers, fan_out, network) < star_s:
                fan_outs[number] = fan_out
    return fan_outs


def _relayed_s(nbytes: int, receivers: int, fan_out: int, network: Network) -> float:
    """Seconds for a relayed lane: each rank sends its bytes `fan_out` times, and buckets wait at every hop."""
    sending_s = fan_out * nbytes / min(network.sender_bytes_per_s, network.receiver_bytes_per_s)
    return sending_s + (_depth(receivers, fan_out) - 1) * fan_out * network.fill_s(nbytes)


def _depth(receivers: int, fan_out: int) -> int:
    """Hops to the last of `receivers` ranks."""
    depth, reached, last = 0, 0, 1
    while reached < receivers:
        last *= fan_out
        reached += last
        depth += 1
    return depth


def _relayed(sender: str, receivers: Sequence[str], fan_out: int) -> Route:
    ranks = (sender, *receivers)  # rank n receives from rank (n - 1) // fan_out, as in a heap
    hops = tuple((ranks[(number - 1) // fan_out], ranks[number]) for number in range(1, len(ranks)))
    return Route("chain" if fan_out == 1 else "tree", hops, _depth(len(receivers), fan_out))
