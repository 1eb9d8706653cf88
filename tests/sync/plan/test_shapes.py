"""The shapes and layouts that plans are tried on are those of real models, and bad ones are refused in one line."""

from __future__ import annotations

import dataclasses
import sys

import pytest
import torch
from cases import covering

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.codecs.quantised.quantisation import wire_specs
from weightlane.sync.plan import Network, plan_report, plan_transfer
from weightlane.sync.plan.prediction.layouts import USUAL, RolloutLayout, TrainerLayout
from weightlane.sync.plan.prediction.shapes import SHAPES, ModelShape, shape_named, weights
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


LAYOUTS = {
    "pp2 ep4": "2x tp4 ep4",
    "tp2 pp2 dp2 ep4": "1x tp8",
    "fsdp4 dp2": "3x tp2",
    "fsdp16": "1x tp16 ep16",
    "": "",
}


@pytest.mark.parametrize(("trainer", "name", "wire"), covering(list(LAYOUTS), list(SHAPES), ["bf16", "fp8"]))
def test_every_layout_holds_and_needs_every_element(trainer: str, name: str, wire: str) -> None:
    shape, rollout = small(name), LAYOUTS[trainer]
    tensors = weights(shape, wire)  # type: ignore[arg-type] - drawn
    held = TrainerLayout.parse(trainer).placements(shape, tensors)
    needed = RolloutLayout.parse(rollout).placements(shape, tensors)
    assert len(held) == TrainerLayout.parse(trainer).ranks
    assert len(needed) == RolloutLayout.parse(rollout).ranks
    report = plan_report(held, needed, FAST)
    assert report["crossing_bytes"] == report["minimum_bytes"]
    assert report["payload_bytes"] == sum(weight.spec.nbytes for weight in tensors)
    replica = [placement for rank, placement in needed.items() if rank.startswith("rollout-0/")]
    found = {weight.spec.name: 0 for weight in tensors}
    for placement in replica:
        for spec, boxes in zip(placement.specs, placement.boxes, strict=True):
            found[spec.name] += sum(box.numel for box in boxes)
    assert all(found[weight.spec.name] >= weight.spec.numel for weight in tensors)
    sent = assign_slices(held)
    whole = Placement.whole([weight.spec for weight in tensors])
    everything = plan_transfer(sent, {"rollout-0": whole})
    assert sum(everything.lane_bytes) == whole.nbytes


def test_more_ranks_than_key_value_heads_share_heads() -> None:
    tensors = weights(small("235b", layers=1))
    needed = RolloutLayout.parse("1x tp8").placements(SHAPES["235b"], tensors)
    heads = [
        placement.boxes[[spec.name for spec in placement.specs].index("model.layers.0.self_attn.k_proj.weight")]
        for placement in needed.values()
    ]
    assert heads == [(Box((rank // 2 * 128, 0), (128, 4096)),) for rank in range(8)]


@pytest.mark.parametrize(
    ("layout", "text", "said"),
    [
        (TrainerLayout, "zz8", "'zz8' is no part of a layout"),
        (TrainerLayout, "pp2 pp4", "pp is given twice"),
        (TrainerLayout, "fsdp8 tp2", "fsdp goes with dp only"),
        (TrainerLayout, "dp2 ep4", "4 ranks do not share the experts of a stage of 2"),
        (TrainerLayout, "pp0", "'pp0' has no valid number of ranks"),
        (TrainerLayout, "pp60000 dp60000", "3600000000 ranks"),
        (RolloutLayout, "8x pp2", "'pp2' is no part of a layout"),
        (RolloutLayout, "tp8 ep4", "ep is 1 or the same as tp"),
    ],
)
def test_layouts_that_cannot_be_are_refused_by_what_is_wrong(layout: type, text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        layout.parse(text)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_experts_that_ranks_cannot_share_and_unknown_shapes_are_refused() -> None:
    with pytest.raises(ConfigError, match="32 experts are not shared by 5 ranks"):
        TrainerLayout.parse("ep5").placements(small("30b"), weights(small("30b")))
    with pytest.raises(ConfigError, match=r"'7b' is no shape that is known\. Known: 30b, 235b, 1t"):
        shape_named("7b")
    assert USUAL.keys() == SHAPES.keys()


def test_a_plan_for_nobody_is_empty_and_takes_no_time() -> None:
    tensors = weights(small("30b"))
    report = plan_report(TrainerLayout.parse("ep4").placements(small("30b"), tensors), {}, FAST)
    assert (report["lanes"], report["crossing_bytes"], report["minimum_bytes"]) == (0, 0, 0)
    assert report["predicted"]["direct_s"] == 0.0
    assert report["payload_bytes"] > 0


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


def calls_of_planning(shape: ModelShape, trainer: str, rollout: str) -> int:
    """How many functions a plan calls: work that is counted and not timed, so that it is the same on every machine."""
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


def test_planning_is_as_many_times_more_work_as_there_are_tensors_and_replicas_alike_are_next_to_none() -> None:
    few, many = (small("1t", layers=layers) for layers in (4, 32))
    assert calls_of_planning(many, "pp4 ep8", "2x tp8 ep8") <= 1.2 * 8 * calls_of_planning(few, "pp4 ep8", "2x tp8 ep8")
    two, many = (calls_of_planning(small("1t"), "pp2 ep8", f"{replicas}x tp8 ep8") for replicas in (2, 64))
    assert many <= 2 * two
