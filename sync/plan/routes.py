"""How a lane reaches all of its receivers: from the sender straight, or handed on from one to the next."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ..config import Network
from .transfer_plan import Lane, TransferPlan

Kind = Literal["star", "chain", "tree"]
_FAN_OUTS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Route:
    """How a lane travels.

    Attributes:
        kind: Whether its sender sends it to everybody (``"star"``), or receivers hand on each bucket when it has come.
        hops: From whom to whom; a rank hands on only what an earlier hop has brought.
        depth: Hops from the sender to the last receiver.
    """

    kind: Kind
    hops: tuple[tuple[str, str], ...]
    depth: int

    def next_after(self, name: str) -> tuple[str, ...]:
        """Whom a rank sends the lane to."""
        return tuple(receiver for sender, receiver in self.hops if sender == name)

    def hops_to(self, name: str) -> int:
        """How many hops the lane takes to a receiver."""
        before = {receiver: sender for sender, receiver in self.hops}
        count = 0
        while (sender := before.get(name)) is not None:
            name, count = sender, count + 1
        return count


def plan_routes(plan: TransferPlan, network: Network, *, may_relay: bool) -> tuple[Route, ...]:
    """A route for each lane of a plan, the same in every process.

    Nobody relays as long as no sender's network card is what takes longest. Where a sender has more to send than the busiest
    receiver has to receive, each of its lanes is handed on in the way that ends first: in a chain when it is long, in a tree
    when it is short, not at all where that is no sooner. To hand on only as many lanes as bring the sender below that was
    slower: while it sends one of the others to everybody, receivers wait. Lanes with the same receivers begin with each of them
    in turn, so that all relay about as much. A relay that is lost is not in the next plan.

    Args:
        plan: The plan.
        network: What links carry.
        may_relay: Whether receivers can send: a matter of the engine's capabilities, and of the memory of their hosts.
    """
    if not may_relay:
        return straight(plan)
    turns: Counter[tuple[str, ...]] = Counter()
    routes = []
    for lane, fan_out in zip(plan.lanes, _fan_outs(plan, network), strict=True):
        if not fan_out:
            routes.append(_star(lane))
            continue
        turn = turns[lane.receivers] % len(lane.receivers)
        turns[lane.receivers] += 1
        routes.append(_handed_on(lane.sender, lane.receivers[turn:] + lane.receivers[:turn], fan_out))
    return tuple(routes)


def straight(plan: TransferPlan) -> tuple[Route, ...]:
    """Routes without a relay: from each lane's sender to each of its receivers."""
    return tuple(map(_star, plan.lanes))


def _star(lane: Lane) -> Route:
    return Route("star", tuple((lane.sender, receiver) for receiver in lane.receivers), 1)


def _fan_outs(plan: TransferPlan, network: Network) -> list[int]:
    """To how many each rank of a lane's route sends; 0 for a star."""
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
            fan_out = min(_FAN_OUTS, key=lambda each: _takes_s(nbytes, receivers, each, network))
            star_s = receivers * nbytes / network.sender_bytes_per_s
            if fan_out < receivers and _takes_s(nbytes, receivers, fan_out, network) < star_s:
                fan_outs[number] = fan_out
    return fan_outs


def _takes_s(nbytes: int, receivers: int, fan_out: int, network: Network) -> float:
    """How long a lane takes if every rank sends to `fan_out` others: its bytes so often, and buckets on the way."""
    sending_s = fan_out * nbytes / min(network.sender_bytes_per_s, network.receiver_bytes_per_s)
    return sending_s + (_depth(receivers, fan_out) - 1) * fan_out * network.fill_s(nbytes)


def _depth(receivers: int, fan_out: int) -> int:
    """Hops to the last of so many receivers."""
    depth, reached, last = 0, 0, 1
    while reached < receivers:
        last *= fan_out
        reached += last
        depth += 1
    return depth


def _handed_on(sender: str, receivers: Sequence[str], fan_out: int) -> Route:
    ranks = (sender, *receivers)  # rank number n gets it from number (n - 1) // fan_out, as in a heap
    hops = tuple((ranks[(number - 1) // fan_out], ranks[number]) for number in range(1, len(ranks)))
    return Route("chain" if fan_out == 1 else "tree", hops, _depth(len(receivers), fan_out))
