"""The shapes and layouts that plans are tried on are those of real models, and bad ones are refused in one line."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.codecs.quantised.quantisation import wire_specs
from weightlane.sync.plan import Network, plan_report, plan_transfer
from weightlane.sync.plan.prediction.layouts import USUAL, RolloutLayout, TrainerLayout
from weightlane.sync.plan.prediction.shapes import SHAPES, ModelShape, weights
from weightlane.sync.plan.send_assignment import assign_slices
from weightlane.sync.version.box import Box
from weightlane.sync.version.placement import Placement

FAST = Network(50e9, 50e9, 20e-6)


def small(name: str, layers: int = 4, experts: int = 32) -> ModelShape:
    return dataclasses.replace(SHAPES[name], layers=layers, experts=experts)


@pytest.mark.parametrize(("name", "billions"), [("30b", 30.53), ("235b", 235.09), ("1t", 1026.4)])
def test_shapes_have_as_many_parameters_as_the_models(name: str, billions: float) -> None:
    tensors = weights(SHAPES[name])
    assert sum(weight.spec.numel for weight in tensors) / 1e9 == pytest.approx(billions, rel=1e-3)
    assert len({weight.spec.name for weight in tensors}) == len(tensors)
    assert {weight.spec.dtype for weight in tensors} == {torch.bfloat16}


def test_fp8_has_the_tensors_of_a_quantised_version() -> None:
    shape = small("1t")
    plain = [weight.spec for weight in weights(shape)]
    assert [weight.spec for weight in weights(shape, "fp8")] == wire_specs(plain, "fp8")


@pytest.mark.parametrize(
    ("trainer", "rollout", "name", "wire"),
    [
        ("pp2 ep4", "2x tp4 ep4", "30b", "bf16"),
        ("tp2 pp2 dp2 ep4", "1x tp8", "235b", "fp8"),
        ("fsdp4 dp2", "3x tp2", "1t", "bf16"),
        ("", "", "30b", "fp8"),
    ],
)
def test_every_layout_holds_and_needs_every_element(trainer: str, rollout: str, name: str, wire: str) -> None:
    shape = small(name)
    tensors = weights(shape, wire)  # type: ignore[arg-type] - drawn
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
    whole = Placement.whole([weight.spec for weight in tensors])
    assert sum(plan_transfer(assign_slices(held), {"rollout-0": whole}).lane_bytes) == whole.nbytes


def test_more_ranks_than_key_value_heads_share_heads() -> None:
    tensors = weights(small("235b", layers=1))
    needed = RolloutLayout.parse("1x tp8").placements(SHAPES["235b"], tensors)
    heads = [
        placement.boxes[[spec.name for spec in placement.specs].index("model.layers.0.self_attn.k_proj.weight")]
        for placement in needed.values()
    ]
    assert heads == [(Box((rank // 2 * 128, 0), (128, 4096)),) for rank in range(8)]


@pytest.mark.parametrize(
    ("layout", "text", "says"),
    [
        (TrainerLayout, "zz8", "'zz8' is no part of a layout"),
        (TrainerLayout, "pp2 pp4", "pp is given twice"),
        (TrainerLayout, "fsdp8 tp2", "fsdp goes with dp only"),
        (TrainerLayout, "dp2 ep4", "4 ranks do not share the experts of a stage of 2"),
        (TrainerLayout, "pp0", "'pp0' has no valid number of ranks"),
        (TrainerLayout, "pp60000 dp60000", "3600000000 ranks"),
        (RolloutLayout, "tp8 ep4", "ep is 1 or the same as tp"),
    ],
)
def test_an_impossible_layout_is_refused_in_one_line_that_names_the_mistake(layout: type, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout.parse(text)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.exhaustive
def test_a_trillion_parameters_are_balanced_and_sent_in_parallel() -> None:
    shape = SHAPES["1t"]
    tensors = weights(shape)
    trainer, rollout = (
        layout.parse(text) for layout, text in zip((TrainerLayout, RolloutLayout), USUAL["1t"], strict=True)
    )
    held, needed = trainer.placements(shape, tensors), rollout.placements(shape, tensors)
    assert (len(held), len(needed)) == (256, 128)
    report = plan_report(held, needed, FAST)
    assert report["crossing_bytes"] == report["minimum_bytes"]
    assert report["largest_share_over_mean"] <= 1.1
    predicted = report["predicted"]
    assert predicted["direct_s"] <= 1.2 * predicted["bound_s"]
    assert predicted["one_stream_per_replica_s"] >= 20 * predicted["direct_s"]


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
    few, many = (calls_of_planning(layers, "pp2 ep8", "2x tp8 ep8") for layers in (2, 8))
    assert many <= 1.2 * 4 * few
    assert calls_of_planning(2, "pp2 ep8", "64x tp8 ep8") <= 2 * few
