"""Routes of plans: every receiver is reached once, relaying is even, and layouts of real models send the fewest bytes."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from drawn import problems
from hypothesis import given
from hypothesis import strategies as st

from weightlane.sync.plan import Network, TransferPlan, plan_report, plan_routes, plan_transfer
from weightlane.sync.plan.prediction.layouts import RolloutLayout, TrainerLayout
from weightlane.sync.plan.prediction.shapes import SHAPES, ModelShape, weights
from weightlane.sync.plan.prediction.traffic import traffic
from weightlane.sync.plan.send_assignment import assign_slices
from weightlane.sync.version.box import Box
from weightlane.sync.version.placement import Placement
from weightlane.sync.version.tensor_spec import TensorSpec

SLOW = Network(1e9, 1e9, latency_s=1e-5, bucket_bytes=1 << 20)
networks = st.builds(Network, st.floats(1.0, 1e3), st.floats(1.0, 1e3), st.floats(0.0, 1.0), st.integers(1, 100))


def one_to_all(replicas: int, senders: int = 1) -> TransferPlan:
    """`senders` ranks hold equal parts of a tensor, all of which every replica needs."""
    spec = TensorSpec("w", (1 << 20, 64), torch.bfloat16)
    each = spec.shape[0] // senders
    held = {f"trainer-{rank}": Placement.of([(spec, Box((rank * each, 0), (each, 64)))]) for rank in range(senders)}
    whole = Placement.whole([spec])
    return plan_transfer(assign_slices(held), {f"rollout-{replica}/0": whole for replica in range(replicas)})


@given(problems(), networks, st.booleans())
def test_every_receiver_gets_a_lane_once_from_somebody_who_has_it(
    problem: tuple, network: Network, may_relay: bool
) -> None:
    _, held, needed = problem
    plan = plan_transfer(assign_slices(held), needed)
    routes = plan_routes(plan, network, may_relay=may_relay)
    assert routes == plan_routes(plan, network, may_relay=may_relay)
    for lane, route in zip(plan.lanes, routes, strict=True):
        have = {lane.sender: 0}
        for sender, receiver in route.hops:
            assert receiver not in have
            have[receiver] = have[sender] + 1
        assert set(have) == {lane.sender, *lane.receivers}
        assert max(have.values()) == route.depth
        assert may_relay or route.kind == "star"
        assert (route.kind == "star") == all(sender == lane.sender for sender, _ in route.hops)
    assert traffic(plan, routes).nbytes == sum(placement.nbytes for placement in needed.values())


def test_receivers_relay_only_where_a_sender_is_what_takes_longest() -> None:
    plan = one_to_all(8)
    assert {route.kind for route in plan_routes(plan, SLOW, may_relay=False)} == {"star"}
    (route,) = plan_routes(plan, SLOW, may_relay=True)
    assert route.kind == "chain"
    assert traffic(plan, [route]).sent["trainer-0"] == plan.lane_bytes[0]
    enough = one_to_all(8, senders=8)
    assert {route.kind for route in plan_routes(enough, SLOW, may_relay=True)} == {"star"}
    fast = Network(16e9, 1e9)
    assert {route.kind for route in plan_routes(plan, fast, may_relay=True)} == {"star"}


def test_lanes_with_the_same_receivers_chain_in_turn_so_that_all_relay_as_much() -> None:
    spec = TensorSpec("w", (1 << 20, 64), torch.bfloat16)
    columns = [Placement.of([(spec, Box((0, 8 * each), (1 << 20, 8)))]) for each in range(8)]
    needed = {f"rollout-{replica}/{rank}": columns[rank] for replica in range(16) for rank in range(8)}
    plan = plan_transfer(assign_slices({f"trainer-{rank}": Placement.whole([spec]) for rank in range(4)}), needed)
    routes = plan_routes(plan, Network(1e9, 1e9, latency_s=1e-6, bucket_bytes=1 << 15), may_relay=True)
    first: dict[tuple[str, ...], list[str]] = {}
    for lane, route in zip(plan.lanes, routes, strict=True):
        if route.kind == "chain":
            first.setdefault(lane.receivers, []).append(route.hops[0][1])
    assert len(first) == 8
    assert all(len(set(each)) == len(each) > 1 for each in first.values())
    relayed = [nbytes for name, nbytes in traffic(plan, routes).sent.items() if name in needed]
    assert max(relayed) <= 1.1 * sum(relayed) / len(needed)


FAST = Network(50e9, 50e9, 20e-6)


def small(name: str, layers: int = 4, experts: int = 32) -> ModelShape:
    """The model of that name with fewer layers and experts."""
    return dataclasses.replace(SHAPES[name], layers=layers, experts=experts)


@pytest.mark.parametrize(
    ("trainer", "rollout", "name", "wire"),
    [("tp2 pp2 dp2 ep4", "1x tp8", "235b", "fp8"), ("fsdp4 dp2", "3x tp2", "1t", "bf16")],
)
def test_every_layout_holds_and_needs_every_element(trainer: str, rollout: str, name: str, wire: str) -> None:
    shape = small(name)
    tensors = weights(shape, wire)  # type: ignore[arg-type]
    held = TrainerLayout.parse(trainer).placements(shape, tensors)
    needed = RolloutLayout.parse(rollout).placements(shape, tensors)
    assert len(held) == TrainerLayout.parse(trainer).ranks
    assert len(needed) == RolloutLayout.parse(rollout).ranks
    report = plan_report(held, needed, FAST)
    assert report["crossing_bytes"] == report["minimum_bytes"]
    assert report["payload_bytes"] == sum(weight.spec.nbytes for weight in tensors)
    found = dict.fromkeys((weight.spec.name for weight in tensors), 0)
    for rank, placement in needed.items():
        if rank.startswith("rollout-0/"):
            for spec, boxes in zip(placement.specs, placement.boxes, strict=True):
                found[spec.name] += sum(box.numel for box in boxes)
    assert all(found[weight.spec.name] >= weight.spec.numel for weight in tensors)


def calls_of_planning(layers: int, trainer: str, rollout: str) -> int:
    """Count the function calls that planning takes: a measure of work that is the same on every machine."""
    shape = small("1t", layers)
    tensors = weights(shape)
    held = TrainerLayout.parse(trainer).placements(shape, tensors)
    needed = RolloutLayout.parse(rollout).placements(shape, tensors)
    calls = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        plan_transfer(assign_slices(held), needed)
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_of_planning_grows_with_the_number_of_tensors_and_hardly_with_equal_replicas() -> None:
    few, many = (calls_of_planning(layers, "pp2 ep4", "2x tp4 ep4") for layers in (2, 6))
    assert many <= 1.2 * 3 * few
    assert calls_of_planning(2, "pp2 ep4", "32x tp4 ep4") <= 2 * few
