"""Quantised versions between ranks that hold and need any slices: everybody gets what the reference leaves of the whole."""

from __future__ import annotations

import pytest
import torch
from direct_hop import LAYOUTS, MakeHop, columns, of_rank, rows, values
from quantised_reference import REFERENCES, left_of

from weightlane.sync import Placement, TensorSpec
from weightlane.sync.codecs.quantised import Scheme
from weightlane.sync.codecs.quantised.quantisation import pair_of, wire_specs
from weightlane.sync.codecs.quantised.quantised_needs import needed_on_the_wire

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
    [("a mesh", ROWS2, "shm", "dense", "int8"), ("columns", TP2, "gloo", "delta", "fp8")],
)
def test_whatever_slices_ranks_hold_and_need_everybody_restores_the_whole_quantised(
    hop: MakeHop, layout: str, needs: list[Placement | None], engine: str, codec: str, scheme: str
) -> None:
    """Also as deltas, where what one rank has of a block changes the scale of what another has."""
    run = hop(engine, *LAYOUTS[layout], needs, specs=SPECS, quantise=scheme, codec=codec, full_every=100)
    tensors = values(0, SPECS)
    for version in (1, 2):
        for tensor in tensors.values():
            tensor.view(-1)[version * 7 % tensor.numel()] *= 4
        run.step(tensors)
        run.publish(version)
        report = run.sync(version)
        assert report.codec == ("dense" if version == 1 else codec)
        assert run.all_hold(left_of(tensors, scheme))
        assert report.quantisation is not None
        assert 0.001 < report.quantisation.relative_rms < (0.04 if scheme == "fp8" else 0.01)


def test_a_rollout_that_needs_the_quantised_tensors_gets_its_slices_of_them_and_no_more(hop: MakeHop) -> None:
    scheme: Scheme = "fp8"
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
