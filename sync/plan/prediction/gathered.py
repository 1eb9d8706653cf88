"""The prediction for engines that store: one trainer rank gathers and writes every tensor, and every rollout rank reads it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...config import Network
from ...version.placement import Placement
from ..receiver_groups import replica_of
from .plan_report import bytes_by_replica
from .traffic import busiest_of

STORE = "the store"
"""Name of the store among the ranks of a link."""


def gathered_report(
    shares: Mapping[str, Placement], receivers: Sequence[str], network: Network, *, links: int = 10
) -> dict[str, Any]:
    """Predict bytes and times, for a store that is as fast as its readers and writers.

    Args:
        shares: The slices that each trainer rank contributes, by name; the first rank gathers.
        receivers: The rollout ranks, each of which reads everything.
        network: Speeds of the network cards.
        links: Number of busiest links to list.

    Returns:
        Sizes in bytes and times in seconds. Keys that `explain` has, too, have the same meaning.
    """
    specs = {spec.name: spec for share in shares.values() for spec in share.specs}.values()
    payload = sum(spec.nbytes for spec in specs)
    leader = next(iter(shares))
    given = {name: share.nbytes for name, share in shares.items() if name != leader}
    moved = {(name, leader): nbytes for name, nbytes in given.items()} | {(leader, STORE): payload}
    moved |= {(STORE, name): payload for name in receivers}
    ordered = sorted(moved.items(), key=lambda link: (-link[1], link[0]))[:links]
    sender, sender_bytes, sender_balance = busiest_of(given | {leader: payload})
    receiver, receiver_bytes, receiver_balance = busiest_of(dict.fromkeys(receivers, payload))
    gather_s = sum(given.values()) / network.sender_bytes_per_s
    write_s, read_s = payload / network.sender_bytes_per_s, payload / network.receiver_bytes_per_s
    # A file is at least a bucket and never less than a tensor, and is complete before a rank reads it.
    window = max([network.bucket_bytes, *(spec.nbytes for spec in specs)])
    slowest = min(network.sender_bytes_per_s, network.receiver_bytes_per_s)
    behind_s = 2 * (min(payload, window) / slowest + network.latency_s)
    return {
        "gathered_by": leader,
        "tensors": len(specs),
        "payload_bytes": payload,
        "trainer_ranks": len(shares),
        "rollout_ranks": len(receivers),
        "replicas": bytes_by_replica({name: replica_of(name) for name in receivers}, dict.fromkeys(receivers, payload)),
        "crossing_bytes": sum(moved.values()),
        "busiest_sender": {"rank": sender, "bytes": sender_bytes, "over_mean": sender_balance},
        "busiest_receiver": {"rank": receiver, "bytes": receiver_bytes, "over_mean": receiver_balance},
        "links": [{"from": a, "to": b, "bytes": nbytes} for (a, b), nbytes in ordered],
        "network": asdict(network),
        "predicted": {
            "gather_s": gather_s,
            "write_s": write_s,
            "read_s": read_s,
            "stored_s": max(gather_s, write_s, read_s) + behind_s,
        },
    }
