"""The session plan: lanes, stream, routes and links, which every participant of a session computes for itself.

Trainer rank 0 publishes the slices that each trainer rank sends, and the rollout ranks publish the slices that they need. From
these messages every participant computes the same plan. The coordinator compares the digests before the first byte is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property

from weightlane.ckpt_engines import Capabilities, Delivery

from ..version.manifest import Manifest
from ..version.placement import Placement
from ..version.sliced_tensors import Slicing
from ..version.tensor_spec import TensorSlice
from .links import PlannedLink, collective_links, links_of
from .plan_exchange import Supply
from .routes import Route, plan_routes
from .transfer_plan import TransferPlan, plan_transfer


class SessionPlan:
    """The plan of one session.

    Args:
        supply: The slices that the trainer ranks send.
        needed: The slices that each rollout rank needs.
        facts: Capabilities of the engine.
    """

    def __init__(self, supply: Supply, needed: Mapping[str, Placement], facts: Capabilities) -> None:
        self.plan: TransferPlan = plan_transfer(supply.shares, needed, cut="shares" if facts.views else "exact")
        self.specs = self.plan.specs
        """Every tensor of the checkpoint, as on the wire."""
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
        """The manifest of dense versions. Every lane is a section of the stream."""
        self.routes: tuple[Route, ...] = plan_routes(self.plan, supply.relay)
        """The route of each lane."""
        if facts.collective:
            self.links = collective_links(self.plan, self.routes)
        else:
            self.links = links_of(self.plan, self.routes, apart=Delivery.POINT_TO_POINT not in facts.delivery)

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits, equal for two participants with the same transfer plan and the same routes."""
        hops = [route.hops for route in self.routes]
        return hashlib.sha256(repr((self.plan.digest, hops)).encode()).hexdigest()[:16]

    @property
    def relays(self) -> bool:
        """Whether a rank relays."""
        return any(route.relayed for route in self.routes)

    def sent_by(self, name: str) -> list[PlannedLink]:
        """The links on which a rank sends."""
        return [link for link in self.links if name in link.senders]

    def received_by(self, name: str) -> list[PlannedLink]:
        """The links on which a rollout rank receives."""
        return [link for link in self.links if name in link.receivers]

    def lanes_to(self, name: str, link: PlannedLink, sender: str) -> list[int]:
        """The lanes from `sender` to a rollout rank on a link."""
        return [lane for lane in link.lanes[sender] if (sender, name) in self.routes[lane].hops]
