"""The explanation of a plan: bytes by replica and link, the busiest ranks, and the predicted time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from ...config import Network
from ...version.placement import Placement
from ..receiver_groups import replica_of
from ..routes import plan_routes
from ..send_assignment import HolderMap
from ..transfer_plan import TransferPlan, plan_transfer
from .predict import gather_and_broadcast, predict
from .traffic import busiest_of, traffic


def plan_report(
    held: Mapping[str, Placement],
    needed: Mapping[str, Placement],
    network: Network,
    *,
    cut: Literal["exact", "shares"] = "exact",
    may_relay: bool = False,
    links: int = 10,
) -> dict[str, Any]:
    """Plan a transfer and explain the plan.

    Args:
        held: The slices that each trainer rank holds, in rank order.
        needed: The slices that each rollout rank needs.
        network: Speeds of the network cards.
        cut: See `plan_transfer`.
        may_relay: See `plan_routes`.
        links: Number of busiest links to list.

    Returns:
        The result of `explain`, and ``planning_s``, the seconds that assignment and plan took here.

    Raises:
        ManifestError: See `HolderMap.of` and `plan_transfer`.
    """
    began = time.perf_counter()
    holders = HolderMap.of(held)
    shares = holders.assign()
    plan = plan_transfer(shares, needed, cut=cut)
    planning_s = time.perf_counter() - began
    explained = explain(plan, holders, shares, needed, network, may_relay=may_relay, links=links)
    return {"cut": cut, "planning_s": planning_s} | explained


def explain(
    plan: TransferPlan,
    holders: HolderMap,
    shares: Mapping[str, Placement],
    needed: Mapping[str, Placement],
    network: Network,
    *,
    may_relay: bool = False,
    links: int = 10,
) -> dict[str, Any]:
    """Explain a plan in plain data: sizes in bytes and times in seconds.

    The trainer ranks hold what `holders` says, and send their `shares`. For the other arguments see `plan_report`.
    """
    replicas = {name: replica_of(name) for name in needed}
    routes = plan_routes(plan, network, may_relay=may_relay)
    moved = traffic(plan, routes)
    payload = sum(spec.nbytes for spec in plan.specs)
    share_bytes = {name: placement.nbytes for name, placement in shares.items()}
    _, most, balance = busiest_of(share_bytes)
    prediction = predict(plan, routes, network)
    through_one = gather_and_broadcast(
        payload, next(iter(share_bytes.values()), 0), len(set(replicas.values())), len(needed), network
    )
    sender, sender_bytes, sender_balance = busiest_of({name: moved.sent.get(name, 0) for name in shares})
    receiver, receiver_bytes, receiver_balance = busiest_of({name: moved.received.get(name, 0) for name in needed})
    return {
        "digest": plan.digest,
        "tensors": len(plan.specs),
        "payload_bytes": payload,
        "trainer_ranks": len(shares),
        "rollout_ranks": len(needed),
        "replicas": bytes_by_replica(replicas, moved.received),
        "lanes": len(plan.lanes),
        "cells": sum(len(lane.cells) for lane in plan.lanes),
        "routes": dict(Counter(route.kind for route in routes)),
        "replicated_bytes": sum(each.box.numel * each.spec.dtype.itemsize for each in holders.replicated()),
        "largest_share_bytes": most,
        "largest_share_over_mean": balance,
        "crossing_bytes": moved.nbytes,
        "minimum_bytes": _needed_bytes(plan, needed),
        "busiest_sender": {"rank": sender, "bytes": sender_bytes, "over_mean": sender_balance},
        "busiest_receiver": {"rank": receiver, "bytes": receiver_bytes, "over_mean": receiver_balance},
        "links": [{"from": a, "to": b, "bytes": nbytes} for a, b, nbytes in moved.busiest(links)],
        "network": asdict(network),
        "predicted": {
            "direct_s": prediction.seconds,
            "bound_s": prediction.bound_s,
            "bound_by": f"{prediction.busiest} {'sending' if prediction.sends else 'receiving'}",
            "gather_s": through_one.gather_s,
            "one_stream_per_replica_s": through_one.streams_s,
            "broadcast_tree_s": through_one.tree_s,
        },
    }


def _needed_bytes(plan: TransferPlan, needed: Mapping[str, Placement]) -> int:
    """The least that must reach all rollout ranks, in the dtypes of the wire."""
    itemsize = {spec.name: spec.dtype.itemsize for spec in plan.specs}
    ranks = Counter(map(id, needed.values()))
    placements = {id(placement): placement for placement in needed.values()}
    return sum(
        ranks[key] * sum(itemsize[spec.name] * box.numel for spec, box in placement.slices)
        for key, placement in placements.items()
    )


def bytes_by_replica(replicas: Mapping[str, str], received: Mapping[str, int]) -> dict[str, int]:
    """The bytes that the ranks of each replica receive together; `replicas` are the replicas of the ranks."""
    found: dict[str, int] = {}
    for rank, replica in replicas.items():
        found[replica] = found.get(replica, 0) + received.get(rank, 0)
    return found
