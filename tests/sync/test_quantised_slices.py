"""Quantised versions between ranks that hold and need any slices: everybody gets what the reference leaves of the whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from direct_hop import Cut, Hop, columns, copies, interleaved, mesh, rows, values
from quantised_reference import restored

from weightlane.sync import TensorSpec

SHAPES: dict[str, tuple[int, ...]] = {
    "embed_tokens.weight": (37, 24),
    "q.weight": (300, 200),
    "o.weight": (130, 384),
    "norm.weight": (24,),
    "scale": (),
}
SPECS = {name: TensorSpec(name, shape, torch.float32) for name, shape in SHAPES.items()}
MATRICES = ("q.weight", "o.weight")
EVERYTHING = None
LAYOUTS: dict[str, tuple[Cut, int]] = {
    "rows": (rows, 3),
    "columns": (columns, 2),
    "interleaved": (interleaved, 2),
    "a mesh": (mesh, 4),
    "data parallel": (copies, 2),
}
"""Some borders divide blocks of 128 x 128, and all between columns divide rows."""


def left_of(tensors: dict[str, torch.Tensor], scheme: str) -> dict[str, torch.Tensor]:
    """What a rollout that is not quantised itself must hold."""
    return {name: restored(tensor, scheme) if name in MATRICES else tensor for name, tensor in tensors.items()}


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
@pytest.mark.parametrize(
    ("layout", "engine"), [*((layout, "gloo") for layout in LAYOUTS), ("a mesh", "shm"), ("columns", "filesystem")]
)
def test_whatever_slices_the_trainers_hold_the_version_is_the_whole_quantised(
    hop: Callable[..., Hop], layout: str, engine: str, scheme: str
) -> None:
    run = hop(engine, *LAYOUTS[layout], [EVERYTHING], specs=SPECS, quantise=scheme)
    for version in (1, 2):
        report = run.sync(version)
        assert run.replicas[0].holds_tensors(left_of(values(version, SPECS), scheme))
        assert report.quantisation is not None
        assert 0.001 < report.quantisation.relative_rms < (0.04 if scheme == "fp8" else 0.01)


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
def test_deltas_of_divided_blocks_are_exact(hop: Callable[..., Hop], scheme: str) -> None:
    """Also where what one rank has of a block changes the scale of what another has."""
    run = hop("shm", columns, 2, [EVERYTHING], specs=SPECS, quantise=scheme, codec="delta", full_every=100)
    tensors = values(0, SPECS)
    codecs = []
    for version in (1, 2, 3):
        for tensor in tensors.values():
            tensor.view(-1)[version * 7 % tensor.numel()] *= 4
        codecs.append(run.sync(version, tensors).codec)
        assert run.replicas[0].holds_tensors(left_of(tensors, scheme))
    assert codecs == ["dense", "delta", "delta"]
