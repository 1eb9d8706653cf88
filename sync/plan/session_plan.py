"""The session plan: lanes, stream, routes and links, which every participant of a session computes for itself.

Trainer rank 0 publishes the slices that each trainer rank sends, and the rollout ranks publish the slices that they need. From
these messages every participant computes the same plan. The coordinator compares the digests before the first byte is sent.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from weightlane.ckpt_engines import Capabilities, Deadline, Delivery, ProtocolError

from ..codecs.quantised.quantisation import needed_on_the_wire
from ..config import Relay, SyncConfig
from ..version.bucket_checksums import SessionMailbox
from ..version.manifest import Manifest
from ..version.placement import Placement
from ..version.sliced_tensors import Slicing
from ..version.tensor_spec import TensorSpec, is_computed
from .links import PlannedLink, Route, collective_links, links_of, plan_routes
from .transfer_plan import plan_transfer

_PART = "transfer plan"
WHOLE = ""
"""The key of a rollout rank that needs every tensor in full."""


@dataclass(frozen=True)
class Supply:
    """The slices that the trainer ranks send, and the form in which they send them.

    Attributes:
        shares: The slices that each publisher sends, in rank order. Together they hold every element once.
        bucket_bytes: Payload of a bucket.
        checksummed: See `Manifest`.
        quantised: See `Manifest`.
        relay: How receivers relay lanes; see `SyncConfig`.
    """

    shares: Mapping[str, Placement]
    bucket_bytes: int
    checksummed: bool
    quantised: str
    relay: Relay = "off"

    @classmethod
    def of(cls, shares: Mapping[str, Placement], config: SyncConfig) -> Supply:
        """The supply of these shares with the user's settings."""
        return cls(shares, config.bucket_bytes, config.integrity == "full", config.quantised, config.relay)

    @cached_property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Every tensor on the wire."""
        return tuple({spec.name: spec for share in self.shares.values() for spec in share.specs}.values())

    @cached_property
    def whole(self) -> Placement:
        """The placement of a rank that needs everything."""
        return Placement.whole(self.specs)

    @property
    def stored_layout(self) -> Manifest:
        """The manifest of dense versions in a store: one stream of full tensors."""
        layout = Manifest(
            0,
            self.specs,
            self.bucket_bytes,
            whole_tensors=True,
            checksummed=self.checksummed,
            quantised=self.quantised,
        )
        return replace(layout, slicing=Slicing(layout.layout_digest, self.specs, layout.regions))

    def on_the_wire(self, needed: Placement) -> Placement | None:
        """Translate `needed` from the receiver's tensors to the tensors on the wire, which may have other dtypes or be quantised.

        Returns None if `needed` has other tensors.
        """
        sent = {spec.name: spec for spec in self.specs}
        needed = needed.named_as(sent.keys())
        asked = {spec.name for spec in needed.specs}
        computed = [spec for name, spec in sent.items() if is_computed(name) and name not in asked]
        needed = Placement((*needed.specs, *computed), (*needed.boxes, *[()] * len(computed)))
        if sent.keys() == {spec.name for spec in needed.specs} and all(
            sent[spec.name].stands_for(spec) or not boxes
            for spec, boxes in zip(needed.specs, needed.boxes, strict=True)
        ):
            return Placement(tuple(sent[spec.name] for spec in needed.specs), needed.boxes)
        if not self.quantised:
            return None
        return needed_on_the_wire(needed, self.specs)

    def to_plain(self) -> list[Any]:
        """The supply as JSON."""
        shares = [[name, share.to_plain()] for name, share in self.shares.items()]
        return [shares, self.bucket_bytes, self.checksummed, self.quantised, self.relay]

    @classmethod
    def from_plain(cls, plain: Any) -> Supply:
        """Parse the message of trainer rank 0; raises `ProtocolError` for anything else."""
        match plain:
            case [
                [*shares],
                int() as bucket_bytes,
                bool() as checksummed,
                ("" | "fp8") as quantised,
                ("off" | "chain" | "tree") as relay,
            ]:
                if all(isinstance(pair, list) and len(pair) == 2 for pair in shares):  # noqa: PLR2004 - name and share
                    pairs = [(str(name), Placement.from_plain(share)) for name, share in shares]
                    return cls(dict(pairs), bucket_bytes, checksummed, quantised, relay)
        raise ProtocolError("the message is no supply.", part=_PART)


class PlanExchange:
    """Exchanges the messages from which the participants of a session compute their plan, in a mailbox of the session."""

    def __init__(self, mailbox: SessionMailbox) -> None:
        self._mailbox = mailbox

    def supply(self, supply: Supply) -> None:
        """[trainer rank 0] Publish the supply."""
        self._mailbox.put("supply", supply.to_plain())

    def need(self, needed: Placement | None) -> str:
        """[rollout rank] Publish the needed slices. Returns their key, which is equal for ranks with the same needs."""
        if needed is None:
            return WHOLE
        self._mailbox.put(f"need/{needed.digest}", needed.to_plain())
        return needed.digest

    def supplied(self, deadline: Deadline) -> Supply:
        """Wait for the supply. Raises `DeadlineExceededError` or `ProtocolError`."""
        return Supply.from_plain(self._mailbox.get("supply", deadline))

    def needed(self, keys: Mapping[str, str], supply: Supply, deadline: Deadline) -> dict[str, Placement]:
        """The slices on the wire that each rollout rank needs, by the rank's name. Raises as `supplied`.

        A rank that needs other tensors than those sent gets everything: it then computes its needs again, or refuses.
        """
        known: dict[str, Placement] = {WHOLE: supply.whole}
        for key in keys.values():
            if key not in known:
                needed = Placement.from_plain(self._mailbox.get(f"need/{key}", deadline))
                known[key] = supply.on_the_wire(needed) or supply.whole
        return {name: known[key] for name, key in keys.items()}


@dataclass(frozen=True)
class SessionPlan:
    """The plan of one session.

    Attributes:
        layout: The manifest of dense versions. Every lane is a section of the stream.
        routes: The route of each lane.
        links: The engine's connections.
    """

    layout: Manifest
    routes: tuple[Route, ...]
    links: list[PlannedLink]

    @classmethod
    def of(cls, supply: Supply, needed: Mapping[str, Placement], facts: Capabilities) -> SessionPlan:
        """Compute the plan. If the engine stores versions, the first trainer rank sends one lane of full tensors.

        Raises:
            ManifestError: See `plan_transfer`.
        """
        if facts.persistent:
            leader, receivers = next(iter(supply.shares)), tuple(needed)
            link = PlannedLink(0, (leader,), receivers, {leader: (0,)})
            return cls(supply.stored_layout, (Route(tuple((leader, name) for name in receivers)),), [link])
        plan = plan_transfer(supply.shares, needed, cut="shares" if facts.views else "exact")
        regions = tuple(cell for lane in plan.lanes for cell in lane.cells)
        layout = Manifest(
            0,
            tuple(region.as_tensor for region in regions),
            supply.bucket_bytes,
            checksummed=supply.checksummed,
            lasting=facts.views,
            quantised=supply.quantised,
            slicing=Slicing(plan.digest, plan.specs, regions),
            sections=tuple(len(lane.cells) for lane in plan.lanes),
        )
        routes = plan_routes(plan, supply.relay)
        if facts.collective:
            return cls(layout, routes, collective_links(plan, routes))
        return cls(layout, routes, links_of(plan, routes, apart=Delivery.POINT_TO_POINT not in facts.delivery))

    @cached_property
    def digest(self) -> str:
        """16 hexadecimal digits, equal for two participants with the same transfer plan and the same relays."""
        hops = [route.hops for route in self.routes if route.relayed]
        return hashlib.sha256(repr((self.layout.plan, hops)).encode()).hexdigest()[:16]

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
