"""How many bytes a plan moves: over each link, from each sender, to each receiver."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..routes import Route
from ..transfer_plan import TransferPlan


@dataclass(frozen=True)
class Traffic:
    """Bytes of one version.

    Attributes:
        links: From whom to whom, receivers that hand on among them.
        sent: By every rank that sends.
        received: By every rank that receives.
        once: By every trainer rank, how much its lanes carry, counted once for each lane.
    """

    links: Mapping[tuple[str, str], int]
    sent: Mapping[str, int]
    received: Mapping[str, int]
    once: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """That cross any link."""
        return sum(self.received.values())

    def busiest(self, count: int) -> list[tuple[str, str, int]]:
        """The `count` links with most bytes, in falling order."""
        ordered = sorted(self.links.items(), key=lambda link: (-link[1], link[0]))
        return [(sender, receiver, nbytes) for (sender, receiver), nbytes in ordered[:count]]


def traffic(plan: TransferPlan, routes: Sequence[Route] | None = None) -> Traffic:
    """Count what a plan moves.

    Args:
        plan: The plan.
        routes: How each lane travels; None when every sender sends to all receivers itself.
    """
    links: Counter[tuple[str, str]] = Counter()
    once: Counter[str] = Counter()
    for number, (lane, nbytes) in enumerate(zip(plan.lanes, plan.lane_bytes, strict=True)):
        once[lane.sender] += nbytes
        hops = routes[number].hops if routes is not None else ((lane.sender, receiver) for receiver in lane.receivers)
        for hop in hops:
            links[hop] += nbytes
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for (sender, receiver), nbytes in links.items():
        sent[sender] += nbytes
        received[receiver] += nbytes
    return Traffic(links, sent, received, once)


def busiest_of(nbytes: Mapping[str, int]) -> tuple[str, int, float]:
    """Who has most, how much, and as a multiple of the mean; ``("", 0, 1.0)`` when there is nobody."""
    if not any(nbytes.values()):
        return "", 0, 1.0
    name = max(nbytes, key=lambda each: nbytes[each])
    return name, nbytes[name], nbytes[name] * len(nbytes) / sum(nbytes.values())
