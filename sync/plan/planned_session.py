"""What a session would do, said before there is one: from what its ranks will hold and need, and what its engine can."""

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
from .send_assignment import Holdings
from .session_plan import SessionPlan, Supply


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
    """Plan as the participants of a session do, and say in plain data what comes of it.

    Args:
        held: What each trainer rank will hold, by name, in rank order.
        needed: What each rollout rank will ask for, by name; None for whole tensors.
        facts: Capabilities of the engine.
        sync: What the user has set.
        network: What links carry.
        relay: Whether receivers may hand on what they get, if the engine lets them.
        links: How many of the busiest links are listed.

    Returns:
        What `explain` says with ``cut`` and ``planning_s``, or `gathered_report` for an engine that stores; and ``notes``,
        sentences about what the figures leave out.

    Raises:
        ManifestError: The ranks together do not hold every element, or disagree about a tensor.
        ConfigError: Nothing can be quantised, or not as it is sharded.
    """
    began = time.perf_counter()
    holdings = Holdings.of(held)
    shares = holdings.shares()
    quantised = "" if sync.quantise == "none" else sync.quantise
    if sync.quantise != "none":
        wire_specs(holdings.specs, sync.quantise)
        shares = {name: quantised_placement(share, sync.quantise) for name, share in shares.items()}
    supply = Supply(shares, network.bucket_bytes, sync.integrity == "full", quantised)
    if facts.persistent:
        notes = [
            "the engine stores: the first trainer rank gathers whole tensors, and every rollout rank reads them all"
        ]
        return gathered_report(shares, list(needed), network, links=links) | {"notes": notes + _of_codec(sync)}
    fitting = {
        name: (None if need is None else supply.said_of_it(need)) or supply.whole for name, need in needed.items()
    }
    session = SessionPlan(supply, fitting, facts)
    planning_s = time.perf_counter() - began
    # Where receivers look at senders' memory there is nothing to hand on.
    may_relay = relay and Delivery.POINT_TO_POINT in facts.delivery and not facts.views
    explained = explain(session.plan, holdings, shares, fitting, network, may_relay=may_relay, links=links)
    notes = _of_codec(sync)
    if facts.views:
        notes.append(
            "the engine shows memory: every trainer rank's share is open to all, who copy what they need of it"
        )
    if relay and not may_relay:
        notes.append("receivers hand on nothing: the engine does not send from one to another")
    if quantised:
        notes.append(f"weights travel as {quantised}, with their scales")
    if stranger := _not_fitting(needed, supply):
        notes.append(f"rollout ranks get whole tensors: they expect {stranger}")
    return {"cut": "shares" if facts.views else "exact", "planning_s": planning_s} | explained | {"notes": notes}


def _of_codec(sync: SyncConfig) -> list[str]:
    if sync.codec == "dense":
        return []
    return [f"the figures are for versions in full; with sync.codec = {sync.codec} most are shorter"]


def _not_fitting(needed: Mapping[str, Placement | None], supply: Supply) -> str:
    """The first tensor of which a rank expects something else than what is sent, and how; empty when there is none."""
    sent = {spec.name: spec for spec in supply.specs}
    for need in needed.values():
        if need is None or supply.said_of_it(need) is not None:
            continue
        asked = {spec.name: spec for spec in need.specs}
        name = next(name for name in [*sent, *asked] if sent.get(name) != asked.get(name))
        if name not in asked:
            return f"no {name}, which is sent"
        if name not in sent:
            return f"{name}, which is not sent"
        return f"{name} as {_looks(asked[name])}, which is sent as {_looks(sent[name])}"
    return ""


def _looks(spec: TensorSpec) -> str:
    return f"{dtype_name(spec.dtype)} of shape {list(spec.shape)}"
