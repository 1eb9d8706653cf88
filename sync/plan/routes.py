"""Routes: how a lane reaches all of its receivers, directly from the sender or relayed from one receiver to the next."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from weightlane.ckpt_engines import Capabilities, ConfigError, Delivery

from ..config import Relay
from .transfer_plan import TransferPlan

_FAN_OUTS = {"chain": 1, "tree": 2}
"""Number of ranks to which each rank sends a relayed lane."""


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
