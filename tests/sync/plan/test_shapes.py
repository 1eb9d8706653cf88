"""Layouts of real models are planned with the fewest bytes, and in time that grows with the number of tensors."""

from __future__ import annotations

import dataclasses
import sys

import pytest

from weightlane.sync.plan import Network, plan_report, plan_transfer
from weightlane.sync.plan.prediction.layouts import RolloutLayout, TrainerLayout
from weightlane.sync.plan.prediction.shapes import SHAPES, ModelShape, weights
from weightlane.sync.plan.send_assignment import assign_slices

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
