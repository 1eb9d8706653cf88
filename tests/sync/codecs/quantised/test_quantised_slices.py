"""Quantised versions between ranks that hold and need any slices: everybody gets what the reference leaves of the whole."""

from __future__ import annotations

import itertools

import pytest
import torch
from direct_hop import EVERYTHING, LAYOUTS, MakeHop, columns, of_rank, rows, values
from hypothesis import given
from hypothesis import strategies as st
from quantised_reference import REFERENCES, left_of

from weightlane.sync import Placement, TensorSpec
from weightlane.sync.codecs.quantised import Scheme
from weightlane.sync.codecs.quantised.quantisation import pair_of, wire_specs
from weightlane.sync.codecs.quantised.quantised_needs import needed_on_the_wire
from weightlane.sync.version.box import Box

SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (37, 24),
    "q.weight": (300, 200),
    "o.weight": (130, 384),
    "norm.weight": (24,),
    "scale": (),
}
SPECS = {name: TensorSpec(name, shape, torch.float32) for name, shape in SHAPES.items()}
MATRICES = ("q.weight", "o.weight")
"""Some borders of `LAYOUTS` divide their blocks of 128 x 128, and all between columns divide rows."""
TP2 = [of_rank(columns, 0, 2, SPECS), of_rank(columns, 1, 2, SPECS)]
ROWS2 = [of_rank(rows, 0, 2, SPECS), of_rank(rows, 1, 2, SPECS)]


@pytest.mark.parametrize(
    ("layout", "needs", "engine", "codec", "scheme"),
    [
        ("a mesh", ROWS2, "shm", "dense", "int8"),
        ("interleaved", [EVERYTHING], "shm", "delta", "fp8"),
        ("columns", TP2, "gloo", "delta", "fp8"),
        pytest.param("data parallel", ROWS2, "filesystem", "dense", "fp8", marks=pytest.mark.exhaustive),
    ],
)
def test_whatever_slices_ranks_hold_and_need_everybody_restores_the_whole_quantised(
    hop: MakeHop, layout: str, needs: list[Placement | None], engine: str, codec: str, scheme: str
) -> None:
    """Also as deltas, where what one rank has of a block changes the scale of what another has."""
    run = hop(engine, *LAYOUTS[layout], needs, specs=SPECS, quantise=scheme, codec=codec, full_every=100)
    tensors = values(0, SPECS)
    for version in (1, 2, 3):
        for tensor in tensors.values():
            tensor.view(-1)[version * 7 % tensor.numel()] *= 4
        run.step(tensors)
        run.publish(version)
        report = run.sync(version)
        assert report.codec == ("dense" if version == 1 else codec)
        assert run.all_hold(left_of(tensors, scheme))
        assert report.quantisation is not None
        assert 0.001 < report.quantisation.relative_rms < (0.04 if scheme == "fp8" else 0.01)


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_a_rollout_that_needs_the_quantised_tensors_gets_its_slices_of_them_and_no_more(
    hop: MakeHop, scheme: Scheme
) -> None:
    wire = {spec.name: spec for spec in wire_specs(SPECS.values(), scheme)}
    asked = [needed_on_the_wire(needed, list(wire.values()), scheme) for needed in TP2]
    needs = [needed for needed in asked if needed is not None]
    run = hop("gloo", *LAYOUTS["rows"], needs, specs=SPECS, rollout_specs=wire, quantise=scheme)
    tensors = values(1, SPECS)
    run.step(tensors)
    run.publish(1)
    report = run.sync(1)
    for name in MATRICES:
        pair = pair_of(SPECS[name], scheme)
        tensors |= dict(zip((pair.weight.name, pair.scales.name), REFERENCES[scheme](tensors[name]), strict=True))
    assert run.all_hold(tensors)
    slices = len(run.publishers[0]._queue.session.layout.specs)  # up to 64 bytes each begin behind a gap
    assert report.sent_bytes <= sum(needed.nbytes for needed in needs) + 64 * slices


@st.composite
def slices_of(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A few parts of a matrix that do not overlap."""
    rows = sorted(draw(st.sets(st.integers(0, shape[0]), min_size=2, max_size=6)))
    parts = []
    for top, bottom in itertools.pairwise(rows):
        left, right = sorted(draw(st.sets(st.integers(0, shape[1]), min_size=2, max_size=2)))
        if draw(st.booleans()):
            parts.append(Box((top, left), (bottom - top, right - left)))
    return parts


@given(data=st.data(), scheme=st.sampled_from(["fp8", "int8"]))
def test_what_is_asked_for_has_the_scale_of_every_element_once_and_no_other(
    data: st.DataObject, scheme: Scheme
) -> None:
    spec = TensorSpec("q.weight", (300, 700), torch.bfloat16)
    boxes = data.draw(slices_of(spec.shape))
    needed = needed_on_the_wire(Placement.of_boxes([(spec, boxes)]), wire_specs([spec], scheme), scheme)
    assert needed is not None
    pair = pair_of(spec, scheme)
    assert needed.specs == (pair.weight, pair.scales)
    assert needed.boxes[0] == tuple(boxes)
    height, width = (128, 128) if scheme == "fp8" else (1, 700)
    wanted, times = torch.zeros(pair.scales.shape), torch.zeros(pair.scales.shape)
    for box in boxes:
        (top, left), (bottom, right) = box.starts, box.stops
        wanted[top // height : -(-bottom // height), left // width : -(-right // width)] = 1
    for box in needed.boxes[1]:
        times[box.index] += 1
    assert torch.equal(times, wanted)


def test_whoever_needs_other_tensors_than_are_sent_is_not_taken_at_its_word() -> None:
    wire = wire_specs(SPECS.values(), "fp8")
    norm = SPECS["norm.weight"]
    others: list[dict[str, TensorSpec]] = [
        {"norm.weight": TensorSpec(norm.name, norm.shape, torch.int64)},
        {"q.weight": TensorSpec("q.weight", (300, 201), torch.float32)},
        {"q.weight": TensorSpec("q.weight", (300, 200), torch.int64)},
        {"more": TensorSpec("more", (1,), torch.float32)},
    ]
    assert needed_on_the_wire(Placement.whole(SPECS.values()), wire, "fp8") is not None
    for changed in others:
        assert needed_on_the_wire(Placement.whole((SPECS | changed).values()), wire, "fp8") is None
