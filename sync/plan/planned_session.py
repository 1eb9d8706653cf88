"""The plan of a session before there is one, from its configuration and the capabilities of its engine."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from weightlane.ckpt_engines import Capabilities, Delivery

from ..codecs.quantised.quantisation import quantised_placement, wire_specs
from ..config import Network, SyncConfig
from ..version.placement import Placement
from ..version.tensor_spec import TensorSpec, dtype_name
from .prediction.gathered import gathered_report
from .prediction.plan_report import explain
from .send_assignment import HolderMap
from .session_plan import SessionPlan
from .supply import Supply


def planned_session(
    held: Mapping[str, Placement],
    needed: Mapping[str, Placement | None],
    facts: Capabilities,
    sync: SyncConfig,
    network: Network,
    *,
    relay: bool = False,
    links: int = 10,
) -> dict[str, Any]:
    """Plan as the participants of a session do, and explain the plan in plain data.

    Args:
        held: The slices that each trainer rank will hold, by name, in rank order.
        needed: The slices that each rollout rank will need, by name; None for whole tensors.
        facts: Capabilities of the engine.
        sync: The user's configuration.
        network: Speeds of the network cards.
        relay: Whether receivers may relay, if the engine lets them.
        links: Number of busiest links to list.

    Returns:
        The result of `explain` with ``cut`` and ``planning_s``, or of `gathered_report` for an engine that stores; and ``notes``,
        sentences about what the figures leave out.

    Raises:
        ManifestError: The ranks together do not hold every element, or disagree about a tensor.
        ConfigError: Nothing can be quantised, or not as it is sharded.
    """
    began = time.perf_counter()
    holders = HolderMap.of(held)
    shares = holders.assign()
    quantised = "" if sync.quantise == "none" else sync.quantise
    if sync.quantise != "none":
        wire_specs(holders.specs)
        shares = {name: quantised_placement(share) for name, share in shares.items()}
    supply = Supply(shares, network.bucket_bytes, sync.integrity == "full", quantised)
    if facts.persistent:
        notes = [
            "the engine stores: the first trainer rank gathers whole tensors, and every rollout rank reads them all"
        ]
        return gathered_report(shares, list(needed), network, links=links) | {"notes": notes + _codec_notes(sync)}
    on_the_wire = {
        name: (None if need is None else supply.on_the_wire(need)) or supply.whole for name, need in needed.items()
    }
    session = SessionPlan(supply, on_the_wire, facts)
    planning_s = time.perf_counter() - began
    # Receivers that read the senders' memory have nothing to relay.
    may_relay = relay and Delivery.POINT_TO_POINT in facts.delivery and not facts.views
    explained = explain(session.plan, holders, shares, on_the_wire, network, may_relay=may_relay, links=links)
    notes = _codec_notes(sync)
    if facts.views:
        notes.append(
            "the engine shows memory: every rollout rank can read every trainer rank's share, and copies the slices it needs"
        )
    if relay and not may_relay:
        notes.append("receivers do not relay: the engine does not send from one to another")
    if quantised:
        notes.append(f"weights are sent as {quantised}, with their scales")
    if mismatch := _first_mismatch(needed, supply):
        notes.append(f"rollout ranks get whole tensors: they expect {mismatch}")
    return {"cut": "shares" if facts.views else "exact", "planning_s": planning_s} | explained | {"notes": notes}


def _codec_notes(sync: SyncConfig) -> list[str]:
    if sync.codec == "dense":
        return []
    return [f"the figures are for dense versions; with sync.codec = {sync.codec} most are shorter"]


def _first_mismatch(needed: Mapping[str, Placement | None], supply: Supply) -> str:
    """The first tensor that a rank expects and that is sent otherwise, in words; empty when there is none."""
    sent = {spec.name: spec for spec in supply.specs}
    for need in needed.values():
        if need is None or supply.on_the_wire(need) is not None:
            continue
        expected = {spec.name: spec for spec in need.named_as(sent.keys()).specs}
        name = next(name for name in [*sent, *expected] if sent.get(name) != expected.get(name))
        if name not in expected:
            return f"no {name}, which is sent"
        if name not in sent:
            return f"{name}, which is not sent"
        return f"{name} as {_looks(expected[name])}, which is sent as {_looks(sent[name])}"
    return ""


def _looks(spec: TensorSpec) -> str:
    return f"{dtype_name(spec.dtype)} of shape {list(spec.shape)}"
