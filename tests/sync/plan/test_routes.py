"""Routes of plans: every receiver is reached once, relaying is even, and layouts of real models send the fewest bytes."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from drawn import problems
from hypothesis import given
from hypothesis import strategies as st

from weightlane.ckpt_engines import Capabilities, Delivery
from weightlane.cli.plan.known_shapes import SHAPES, ModelShape, RolloutLayout, TrainerLayout, weights
from weightlane.cli.plan.plan_report import Shown, plan_report
from weightlane.sync.codecs.quantised.quantisation import quantised_placement
from weightlane.sync.config import Relay, SyncConfig
from weightlane.sync.plan import HolderMap, plan_transfer
from weightlane.sync.plan.links import plan_routes
from weightlane.sync.version.box import Box
from weightlane.sync.version.placement import Placement
from weightlane.sync.version.tensor_spec import TensorSpec

DIRECT = Capabilities(frozenset({"cpu"}), frozenset({Delivery.POINT_TO_POINT}))


@given(problems(), st.sampled_from(["off", "chain", "tree"]))
def test_every_receiver_gets_a_lane_once_from_somebody_who_has_it(problem: tuple, relay: Relay) -> None:
    _, held, needed = problem
    shares = HolderMap.of(held).assign()
    plan = plan_transfer(shares, needed)
    routes = plan_routes(plan, relay)
    assert routes == plan_routes(plan, relay)
    for lane, route in zip(plan.lanes, routes, strict=True):
        have = {lane.sender: 0}
        for sender, receiver in route.hops:
            assert receiver not in have
            have[receiver] = have[sender] + 1
            assert route.hops_to(receiver) == have[receiver]
        assert set(have) == {lane.sender, *lane.receivers}
        assert route.relayed == (max(have.values()) > 1) == any(map(route.next_after, lane.receivers))
        most = {"off": len(lane.receivers), "chain": 1, "tree": 2}[relay]
        assert max(len(route.next_after(name)) for name in have) <= most


def test_lanes_with_the_same_receivers_take_turns_so_that_all_relay_as_much() -> None:
    """Sixteen replicas of eight ranks need a version of 128 MiB each, over network cards of 1 GB/s.

    Over a collective engine receivers broadcast what one of them gets.
    """
    spec = TensorSpec("w", (1 << 20, 64), torch.bfloat16)
    columns = [Placement.of([(spec, Box((0, 8 * each), (1 << 20, 8)))]) for each in range(8)]
    needed = {f"rollout-{replica}/{rank}": columns[rank] for replica in range(16) for rank in range(8)}
    held = {f"trainer-{rank}": Placement.whole([spec]) for rank in range(4)}
    plan = plan_transfer(HolderMap.of(held).assign(), needed)
    relaying: list[tuple[Relay, bool, int]] = [
        ("off", False, 16),
        ("off", True, 1),
        ("chain", True, 1),
        ("tree", True, 2),
    ]
    for relay, collective, sends in relaying:
        assert len({route.hops[0] for route in plan_routes(plan, relay)}) == len(plan.lanes) == 32
        speeds: Shown = {"sender_gbps": 8, "receiver_gbps": 8}
        facts = dataclasses.replace(DIRECT, collective=collective)
        report = plan_report(held, needed, facts, SyncConfig(relay=relay), **speeds)
        broadcast = collective and relay == "off"
        assert report["broadcast_lanes"] == 32 * broadcast
        assert report["busiest_sender"]["bytes"] == sends * spec.nbytes / 4
        assert report["busiest_sender"]["seconds"] == sends * spec.nbytes / 4e9
        assert report["busiest_receiver"]["seconds"] == pytest.approx(spec.nbytes / 8e9)
        assert report["relayed_lanes"] == (0 if relay == "off" else 32)
        if relay != "off" or broadcast:
            assert report["busiest_relay"]["over_mean"] < 1.15
        else:
            assert report["busiest_relay"] is None


def small(name: str, layers: int = 4, experts: int = 32) -> ModelShape:
    """The model of that name with fewer layers and experts."""
    return dataclasses.replace(SHAPES[name], layers=layers, experts=experts)


@pytest.mark.parametrize(
    ("trainer", "rollout", "name", "quantise"),
    [("tp2 pp2 dp2 ep4", "1x tp8", "235b", "fp8"), ("fsdp4 dp2", "3x tp2", "1t", "none")],
)
def test_every_layout_holds_and_needs_every_element(trainer: str, rollout: str, name: str, quantise: str) -> None:
    shape = small(name)
    tensors = list(weights(shape))
    held = TrainerLayout.parse(trainer).placements(shape, tensors)
    needed = RolloutLayout.parse(rollout).placements(shape, tensors)
    assert len(held) == TrainerLayout.parse(trainer).ranks
    assert len(needed) == RolloutLayout.parse(rollout).ranks
    report = plan_report(held, needed, DIRECT, SyncConfig(quantise=quantise))  # type: ignore[arg-type]
    assert report["crossing_bytes"] == report["minimum_bytes"]
    sent = Placement.whole(weight.spec for weight in tensors)
    assert report["payload_bytes"] == (quantised_placement(sent) if quantise == "fp8" else sent).nbytes
    found = dict.fromkeys((weight.spec.name for weight in tensors), 0)
    for rank, placement in needed.items():
        if rank.startswith("rollout-0/"):
            for spec, boxes in zip(placement.specs, placement.boxes, strict=True):
                found[spec.name] += sum(box.numel for box in boxes)
    assert all(found[weight.spec.name] >= weight.spec.numel for weight in tensors)


def calls_of_planning(layers: int, trainer: str, rollout: str) -> int:
    """Count the function calls that planning takes: a measure of work that is the same on every machine."""
    shape = small("1t", layers)
    tensors = list(weights(shape))
    held = TrainerLayout.parse(trainer).placements(shape, tensors)
    needed = RolloutLayout.parse(rollout).placements(shape, tensors)
    calls = 0

    def note(_: object, event: str, __: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(note)
    try:
        plan_transfer(HolderMap.of(held).assign(), needed)
    finally:
        sys.setprofile(None)
    return calls


def test_the_work_of_planning_grows_with_the_number_of_tensors_and_hardly_with_equal_replicas() -> None:
    few, many = (calls_of_planning(layers, "pp2 ep4", "2x tp4 ep4") for layers in (2, 6))
    assert many <= 1.2 * 3 * few
    assert calls_of_planning(2, "pp2 ep4", "32x tp4 ep4") <= 2 * few
