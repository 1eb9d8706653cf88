"""Random tensors, cut at random, held and needed by random ranks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from weightlane.sync.version.box import Box
from weightlane.sync.version.placement import Placement
from weightlane.sync.version.tensor_spec import TensorSpec

Draw = st.DrawFn
Slices = dict[str, list[tuple[TensorSpec, Box]]]


@st.composite
def tensors(draw: Draw, most: int = 4) -> list[TensorSpec]:
    shapes = draw(st.lists(st.lists(st.integers(0, 5), max_size=4).map(tuple), min_size=1, max_size=most))
    dtypes = st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn])
    return [TensorSpec(f"t{index}", shape, draw(dtypes)) for index, shape in enumerate(shapes)]


def nothing_of(spec: TensorSpec) -> Box:
    """An empty slice, by which a rank says that it knows the tensor."""
    return Box((0,) * len(spec.shape), (0,) * len(spec.shape))


@st.composite
def grids(draw: Draw, shape: tuple[int, ...]) -> list[Box]:
    """A tensor of `shape` cut through along each axis at random places: boxes that hold every element once."""
    axes = []
    for size in shape:
        cuts = sorted({0, size, *(draw(st.lists(st.integers(0, size), max_size=2)))})
        axes.append([(first, last - first) for first, last in itertools.pairwise(cuts)])
    return [Box(tuple(a for a, _ in parts), tuple(b for _, b in parts)) for parts in itertools.product(*axes)]


@st.composite
def holdings(draw: Draw, specs: Sequence[TensorSpec], ranks: int) -> dict[str, Placement]:
    """Every element is held by someone; replicas may be cut in another way than what they replicate."""
    held: Slices = {f"trainer-{rank}": [] for rank in range(ranks)}
    names = list(held)
    for spec in specs:
        turn = draw(st.permutations(names))
        first = draw(st.integers(1, ranks))
        for among in (turn[:first], turn[first:]):
            for box in draw(grids(spec.shape)):
                complete = among is not turn[first:] and among
                chosen = draw(st.sets(st.sampled_from(among), min_size=1 if complete else 0)) if among else set()
                for name in names:
                    if name in chosen:
                        held[name].append((spec, box))
        if spec.shape and (not spec.numel or draw(st.booleans())):
            held[draw(st.sampled_from(names))].append((spec, nothing_of(spec)))
    return {name: Placement.of(slices) for name, slices in held.items()}


@st.composite
def needs(draw: Draw, specs: Sequence[TensorSpec], replicas: int, ranks: int) -> dict[str, Placement]:
    """Each replica's ranks know all tensors between them, and need random slices; some replicas are alike."""
    different = draw(st.integers(1, replicas))
    kinds = []
    for _ in range(different):
        slices: list[list[tuple[TensorSpec, Box]]] = [[] for _ in range(ranks)]
        for spec in specs:
            for rank in range(ranks):
                if rank == 0 or draw(st.booleans()):
                    slices[rank].append((spec, nothing_of(spec)))  # of a scalar this is all
                    for box in draw(grids(spec.shape)) if spec.shape else ():
                        if draw(st.booleans()):
                            slices[rank].append((spec, box))
        kinds.append([Placement.of(each) for each in slices])
    return {
        f"rollout-{replica}/{rank}": kinds[replica % different][rank]
        for replica in range(replicas)
        for rank in range(ranks)
    }


@st.composite
def problems(draw: Draw) -> tuple[list[TensorSpec], dict[str, Placement], dict[str, Placement]]:
    specs = draw(tensors())
    held = draw(holdings(specs, draw(st.integers(1, 4))))
    return specs, held, draw(needs(specs, draw(st.integers(1, 3)), draw(st.integers(1, 3))))
