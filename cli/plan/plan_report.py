"""Reports of transfer plans as plain data: bytes of each link, the busiest ranks, and their times at given link speeds."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

from weightlane.ckpt_engines import Capabilities
from weightlane.sync.codecs.quantised.quantisation import quantised_shares
from weightlane.sync.config import SyncConfig
from weightlane.sync.plan import HolderMap, TransferPlan, plan_transfer
from weightlane.sync.plan.links import PlannedLink, Route, collective_links, plan_routes
from weightlane.sync.plan.session_plan import Supply
from weightlane.sync.version.placement import Placement
from weightlane.sync.version.tensor_spec import TensorSpec, dtype_name, is_computed

STORE = "the store"
"""Name of the store in a report's links."""


_BROADCAST_NOTE = (
    "receivers of a broadcast lane pass it on among themselves, here in the order of their ranks; the engine's library may choose"
    " another order"
)


class Shown(TypedDict, total=False):
    """Options of a report; see `traffic_report`."""

    links: int
    sender_gbps: float
    receiver_gbps: float


def plan_report(
    held: Mapping[str, Placement],
    needed: Mapping[str, Placement | None],
    facts: Capabilities,
    sync: SyncConfig,
    **shown: Unpack[Shown],
) -> dict[str, Any]:
    """Compute the plan as the participants of a session do, and report it.

    Args:
        held: The slices that each trainer rank will hold, by name, in rank order.
        needed: The slices that each rollout rank will need, by name; None for full tensors.
        facts: Capabilities of the engine.
        sync: The user's configuration.
        shown: See `traffic_report`.

    Returns:
        Sizes of the plan, ``minimum_bytes`` (the bytes that rollout ranks need, each sent once to each rank), the result of
        `traffic_report`, and ``notes``: sentences about the assumptions behind the figures. For an engine that stores versions
        the result of `store_report`, and ``notes``.

    Raises:
        ManifestError: The ranks together do not hold every element, or disagree about a tensor.
        ConfigError: Nothing can be quantised.
    """
    shares = HolderMap.of(held).assign()
    if sync.quantised:
        shares = quantised_shares(shares)
    notes = []
    if sync.codec != "dense":
        notes.append(f"the figures are for dense versions; with sync.codec = {sync.codec} most are shorter")
    if sync.quantised:
        notes.append(f"weights are sent as {sync.quantised}, with their scales")
    if facts.persistent:
        notes.append("the first trainer rank gathers whole tensors and writes them; every rollout rank reads them all")
        return store_report(shares, needed, **shown) | {"notes": notes}
    supply = Supply.of(shares, sync)
    known = {id(need): None if need is None else supply.on_the_wire(need) for need in needed.values()}
    on_the_wire = {name: known[id(need)] or supply.whole for name, need in needed.items()}
    if facts.views:
        notes.append("every rollout rank can read the memory of every trainer rank, and copies the slices it needs")
    if mismatch := _first_mismatch([need for need in needed.values() if known[id(need)] is None], supply):
        notes.append(f"rollout ranks get whole tensors: they expect {mismatch}")
    cut: Literal["exact", "shares"] = "shares" if facts.views else "exact"
    plan = plan_transfer(shares, on_the_wire, cut=cut)
    routes = plan_routes(plan, sync.relay)
    broadcast = _broadcast_hops(plan, routes) if facts.collective else {}
    if broadcast:
        notes.append(_BROADCAST_NOTE)
    links: Counter[tuple[str, str]] = Counter()
    for number, (route, lane) in enumerate(zip(routes, plan.lanes, strict=True)):
        for hop in broadcast.get(number, route.hops):
            links[hop] += lane.nbytes
    return {
        "digest": plan.digest,
        "tensors": len(plan.specs),
        "payload_bytes": sum(spec.nbytes for spec in plan.specs),
        "cut": cut,
        "relay": sync.relay,
        "lanes": len(plan.lanes),
        "relayed_lanes": sum(route.relayed for route in routes),
        "broadcast_lanes": len(broadcast),
        "cells": sum(len(lane.cells) for lane in plan.lanes),
        "minimum_bytes": _nbytes_of_all(on_the_wire),
        **traffic_report(links, shares, needed, **shown),
        "notes": notes,
    }


def _nbytes_of_all(needed: Mapping[str, Placement]) -> int:
    """Bytes that all rollout ranks need together; of a placement that ranks share, elements are counted once."""
    distinct = {id(placement): placement for placement in needed.values()}
    sizes = {key: placement.nbytes for key, placement in distinct.items()}
    return sum(sizes[id(placement)] for placement in needed.values())


def _broadcast_hops(plan: TransferPlan, routes: Sequence[Route]) -> dict[int, list[tuple[str, str]]]:
    """The hops of each lane that a collective engine broadcasts: from its sender to a receiver, and from each to the next one."""
    found: dict[int, list[tuple[str, str]]] = {}
    for link in collective_links(plan, routes):
        for index, sender in enumerate(link.senders):
            for lane in link.lanes[sender]:
                receivers = plan.lanes[lane].receivers
                if _is_broadcast(link, receivers) and not routes[lane].relayed:
                    first = index * len(receivers) // len(link.senders)
                    found[lane] = list(itertools.pairwise((sender, *receivers[first:], *receivers[:first])))
    return found


def _is_broadcast(link: PlannedLink, receivers: tuple[str, ...]) -> bool:
    """Whether a collective engine broadcasts the buckets for these receivers: all of a link with one sender, or a set."""
    return (len(link.senders) == 1 < len(link.receivers) == len(receivers)) or receivers in link.receiver_sets


def store_report(shares: Mapping[str, Placement], receivers: Collection[str], **shown: Unpack[Shown]) -> dict[str, Any]:
    """Report the traffic of an engine that stores versions: one trainer rank gathers and writes, every rollout rank reads.

    Args:
        shares: The slices that each trainer rank contributes, by name; the first rank gathers.
        receivers: The rollout ranks, each of which reads everything.
        shown: See `traffic_report`.
    """
    specs = {spec.name: spec for share in shares.values() for spec in share.specs}.values()
    payload = sum(spec.nbytes for spec in specs)
    leader, *others = shares
    links = {(name, leader): shares[name].nbytes for name in others}
    links |= {(leader, STORE): payload, **{(STORE, name): payload for name in receivers}}
    return {
        "gathered_by": leader,
        "tensors": len(specs),
        "payload_bytes": payload,
        **traffic_report(links, shares, receivers, **shown),
    }


def traffic_report(
    traffic: Mapping[tuple[str, str], int],
    senders: Collection[str],
    receivers: Collection[str],
    *,
    links: int = 10,
    sender_gbps: float = 0.0,
    receiver_gbps: float = 0.0,
) -> dict[str, Any]:
    """Report the traffic of one version.

    Args:
        traffic: Bytes by sending and receiving rank.
        senders: All trainer ranks.
        receivers: All rollout ranks.
        links: Number of busiest links to list.
        sender_gbps: Speed of a trainer rank's network card in Gbit/s; 0 if it is unknown.
        receiver_gbps: Speed of a rollout rank's network card in Gbit/s in each direction; 0 if it is unknown.

    Returns:
        Bytes over all links and by replica, the busiest links, and the busiest trainer rank, rollout rank and relay. Each of
        these ranks has its bytes, their ratio to the mean, and ``seconds``: the bytes divided by the card's speed, a lower limit
        for the time of a version.
    """
    sent: Counter[str] = Counter()
    received: Counter[str] = Counter()
    for (sender, receiver), nbytes in traffic.items():
        sent[sender] += nbytes
        received[receiver] += nbytes
    replicas: Counter[str] = Counter()
    for name in receivers:
        replicas[name.rpartition("/")[0] or name] += received[name]  # "rollout-0/3" -> "rollout-0"
    ordered = sorted(traffic.items(), key=lambda link: (-link[1], link[0]))[:links]
    return {
        "trainer_ranks": len(senders),
        "rollout_ranks": len(receivers),
        "replicas": dict(replicas),
        "crossing_bytes": sum(traffic.values()),
        "busiest_sender": _busiest(sent, senders, sender_gbps),
        "busiest_receiver": _busiest(received, receivers, receiver_gbps),
        "busiest_relay": _busiest(sent, receivers, receiver_gbps),
        "links": [{"from": sender, "to": receiver, "bytes": nbytes} for (sender, receiver), nbytes in ordered],
    }


def _busiest(nbytes: Mapping[str, int], ranks: Collection[str], gbps: float) -> dict[str, Any] | None:
    """The rank of `ranks` with the most bytes; None if no rank has any."""
    name = max(ranks, key=lambda each: nbytes.get(each, 0))
    if not (most := nbytes.get(name, 0)):
        return None
    mean = sum(nbytes.get(each, 0) for each in ranks) / len(ranks)
    return {"rank": name, "bytes": most, "over_mean": most / mean, "seconds": 8e-9 * most / gbps if gbps else None}


def _first_mismatch(others: Iterable[Placement | None], supply: Supply) -> str:
    """Text about the first tensor that is not sent as a rank in `others` expects it; empty if there is none."""
    sent = {spec.name: spec for spec in supply.specs}
    for need in others:
        if need is None:
            continue
        expected = {spec.name: spec for spec in need.named_as(sent.keys()).specs}
        names = [*expected, *(name for name in sent if not is_computed(name))]
        name = next(name for name in names if name not in sent or not _fits(sent[name], expected.get(name)))
        if name not in expected:
            return f"no {name}, which is sent"
        if name not in sent:
            return f"{name}, which is not sent"
        return f"{name} as {_looks(expected[name])}, which is sent as {_looks(sent[name])}"
    return ""


def _fits(sent: TensorSpec, expected: TensorSpec | None) -> bool:
    return expected is not None and sent.stands_for(expected)


def _looks(spec: TensorSpec) -> str:
    return f"{dtype_name(spec.dtype)} of shape {list(spec.shape)}"
