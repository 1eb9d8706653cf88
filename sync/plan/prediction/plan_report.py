"""A plan explained: how much goes where, what is busiest, and how long it should take."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict
from typing import Any, Literal

from ...config import Network
from ...version.placement import Placement
from ..receiver_groups import replica_of
from ..routes import plan_routes
from ..send_assignment import Holdings
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
    replicas: Mapping[str, str] | None = None,
    unused: Collection[str] = (),
    links: int = 10,
) -> dict[str, Any]:
    """Plan, and say in plain data what comes of it.

    Args:
        held: What each trainer rank holds; rank order is the order of the mapping.
        needed: What each rollout rank needs.
        network: What links carry.
        cut: As in `plan_transfer`.
        may_relay: As in `plan_routes`.
        replicas: As in `plan_transfer`.
        unused: As in `plan_transfer`.
        links: How many of the busiest links are listed.

    Returns:
        What `explain` says, and ``planning_s``, those of `shares` and `plan_transfer` here.

    Raises:
        ManifestError: As `shares` and `plan_transfer`.
    """
    began = time.perf_counter()
    holdings = Holdings.of(held)
    shares = holdings.shares()
    plan = plan_transfer(shares, needed, cut=cut, replicas=replicas, unused=unused)
    planning_s = time.perf_counter() - began
    explained = explain(plan, holdings, shares, needed, network, may_relay=may_relay, replicas=replicas, links=links)
    return {"cut": cut, "planning_s": planning_s} | explained


def explain(
    plan: TransferPlan,
    holdings: Holdings,
    shares: Mapping[str, Placement],
    needed: Mapping[str, Placement],
    network: Network,
    *,
    may_relay: bool = False,
    replicas: Mapping[str, str] | None = None,
    links: int = 10,
) -> dict[str, Any]:
    """Say in plain data what comes of a plan.

    Args:
        plan: The plan.
        holdings: What the trainer ranks hold.
        shares: What each trainer rank sends, by name; rank order is the order of the mapping.
        needed: What each rollout rank needs.
        network: What links carry.
        may_relay: As in `plan_routes`.
        replicas: As in `plan_transfer`.
        links: How many of the busiest links are listed.

    Returns:
        Sizes are in bytes, times in seconds.
    """
    of_rank = {name: replica_of(name) if replicas is None else replicas.get(name, name) for name in needed}
    routes = plan_routes(plan, network, may_relay=may_relay)
    moved = traffic(plan, routes)
    payload = sum(spec.nbytes for spec in plan.specs)
    needs = _needed_bytes(plan, needed)
    share_bytes = {name: placement.nbytes for name, placement in shares.items()}
    _, most, balance = busiest_of(share_bytes)
    prediction = predict(plan, routes, network)
    through_one = gather_and_broadcast(
        payload, next(iter(share_bytes.values()), 0), len(set(of_rank.values())), len(needed), network
    )
    sender, sender_bytes, sender_balance = busiest_of({name: moved.sent.get(name, 0) for name in shares})
    receiver, receiver_bytes, receiver_balance = busiest_of({name: moved.received.get(name, 0) for name in needed})
    return {
        "digest": plan.digest,
        "tensors": len(plan.specs),
        "payload_bytes": payload,
        "trainer_ranks": len(shares),
        "rollout_ranks": len(needed),
        "replicas": bytes_by_replica(of_rank, moved.received),
        "lanes": len(plan.lanes),
        "cells": sum(len(lane.cells) for lane in plan.lanes),
        "routes": dict(Counter(route.kind for route in routes)),
        "replicated_bytes": sum(each.box.numel * each.spec.dtype.itemsize for each in holdings.replicated()),
        "largest_share_bytes": most,
        "largest_share_over_mean": balance,
        "crossing_bytes": moved.nbytes,
        "minimum_bytes": sum(needs.values()),
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


def _needed_bytes(plan: TransferPlan, needed: Mapping[str, Placement]) -> dict[str, int]:
    """Of each rollout rank, the least that must reach it, in the dtypes of the wire."""
    itemsize = {spec.name: spec.dtype.itemsize for spec in plan.specs}
    found: dict[int, int] = {}
    for placement in needed.values():
        if id(placement) not in found:
            slices = zip(placement.specs, placement.boxes, strict=True)
            found[id(placement)] = sum(itemsize[spec.name] * box.numel for spec, boxes in slices for box in boxes)
    return {name: found[id(placement)] for name, placement in needed.items()}


def bytes_by_replica(of_rank: Mapping[str, str], received: Mapping[str, int]) -> dict[str, int]:
    """What reaches the ranks of each replica together."""
    found: dict[str, int] = {}
    for rank, replica in of_rank.items():
        found[replica] = found.get(replica, 0) + received.get(rank, 0)
    return found
