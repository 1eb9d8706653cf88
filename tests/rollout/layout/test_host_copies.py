"""A version that lies in memory like the one before is copied without another look at each tensor, and any other one is not."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from bits import bits
from layout_models import random_bits

from weightlane.ckpt_engines import CommitError
from weightlane.rollout.layout.map.layout_map import SourceSpec
from weightlane.rollout.layout.trace.trace import trace_loading
from weightlane.rollout.layout.write.commit_plan import CommitPlan
from weightlane.sync import Manifest, TensorSpec

SHAPES: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "row": ((300,), torch.bfloat16),
    "scalar": ((), torch.float32),
    "large": ((300, 256), torch.bfloat16),
    "columns": ((64, 512), torch.bfloat16),
    "cast": ((20, 30), torch.float32),
    "bytes": ((33,), torch.uint8),
    "nothing": ((0, 4), torch.bfloat16),
    "part": ((10, 6), torch.float32),
}


class Model(torch.nn.Module):
    """Takes whole tensors, half of every row of one, the end of another, and casts a third."""

    def __init__(self) -> None:
        super().__init__()
        for name, (shape, dtype) in SHAPES.items():
            of_model = {"columns": (64, 256), "part": (4, 6)}.get(name, shape)
            live = torch.full(of_model, 3, dtype=torch.bfloat16 if name == "cast" else dtype)
            self.register_parameter(name, torch.nn.Parameter(live, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            taken = tensor[:, 256:] if name == "columns" else tensor[6:] if name == "part" else tensor
            self.get_parameter(name).data.copy_(taken)
            loaded.add(name)
        return loaded


MANIFEST = Manifest(1, tuple(TensorSpec(name, *spec) for name, spec in SHAPES.items()), 1 << 16)


def staged(seed: int) -> dict[str, torch.Tensor]:
    """A version as staging has it: views of one stream, which is longer than it and begins elsewhere."""
    stream = torch.zeros(MANIFEST.total_bytes + 256, dtype=torch.uint8)[64:]
    views = MANIFEST.views(stream[: MANIFEST.total_bytes])
    for place, view in enumerate(views.values()):
        view.copy_(random_bits(tuple(view.shape), view.dtype, seed=seed + place))
    return views


def planned() -> tuple[Model, CommitPlan]:
    model = Model()
    return model, CommitPlan(trace_loading(model, {name: SourceSpec(*spec) for name, spec in SHAPES.items()}), model)


def everything(model: Model) -> list[torch.Tensor]:
    return [bits(parameter.data) for parameter in model.parameters()]


def expected(version: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    model = Model()
    model.load_weights(version.items())
    return everything(model)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(one, other, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_versions_that_lie_alike_and_versions_that_do_not_arrive_bit_for_bit(threads: int) -> None:
    model, plan = planned()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        apart = {name: tensor.clone() for name, tensor in staged(30).items()}
        mixed = staged(40) | {"row": random_bits((300,), torch.bfloat16, seed=41)}
        turned = dict(reversed(staged(50).items()))
        for version in (staged(0), staged(10), staged(20), apart, apart, staged(30), mixed, mixed, turned, staged(60)):
            plan.commit(version)
            assert same(everything(model), expected(version))
    finally:
        torch.set_num_threads(before)


def test_a_version_that_only_looks_like_the_one_before_is_refused_before_anything_is_copied() -> None:
    model, plan = planned()
    plan.commit(staged(0))
    before = everything(model)
    version = staged(10)
    for name, odd in {
        "large": version["large"].view(256, 300),
        "row": version["row"].view(torch.int16),
        "columns": version["columns"].view(512, 64).t(),
        "part": version["part"][:5],
    }.items():
        with pytest.raises(CommitError):
            plan.commit(version | {name: odd})
    del version["part"]
    with pytest.raises(CommitError):
        plan.commit(version)
    assert same(everything(model), before)
    plan.commit(staged(20))
    assert same(everything(model), expected(staged(20)))
