"""The traffic of a plan: bytes over each link, from each sender, and to each receiver."""

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
        links: Bytes from a sender to a receiver, relays included.
        sent: Bytes that each rank sends.
        received: Bytes that each rank receives.
    """

    links: Mapping[tuple[str, str], int]
    sent: Mapping[str, int]
    received: Mapping[str, int]

    @property
    def nbytes(self) -> int:
        """Bytes over all links."""
        return sum(self.received.values())

    def busiest(self, count: int) -> list[tuple[str, str, int]]:
        """Sender, receiver and bytes of the `count` links with most bytes, in falling order."""
        ordered = sorted(self.links.items(), key=lambda link: (-link[1], link[0]))
        return [(sender, receiver, nbytes) for (sender, receiver), nbytes in ordered[:count]]


def traffic(plan: TransferPlan, routes: Sequence[Route]) -> Traffic:
    """Count the bytes of a plan whose lanes take these routes."""
    links: Counter[tuple[str, str]] = Counter()
    for route, nbytes in zip(routes, plan.lane_bytes, strict=True):
        for hop in route.hops:
            links[hop] += nbytes
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for (sender, receiver), nbytes in links.items():
        sent[sender] += nbytes
        received[receiver] += nbytes
    return Traffic(links, sent, received)


def busiest_of(nbytes: Mapping[str, int]) -> tuple[str, int, float]:
    """The rank with most bytes, these bytes, and their ratio to the mean; ``("", 0, 1.0)`` where there are none."""
    if not any(nbytes.values()):
        return "", 0, 1.0
    name = max(nbytes, key=lambda each: nbytes[each])
    return name, nbytes[name], nbytes[name] * len(nbytes) / sum(nbytes.values())
