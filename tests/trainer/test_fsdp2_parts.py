"""How parameters are split into the parts of an optimizer step."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane.trainer.fsdp2_parts import split_into_parts
from weightlane.trainer.hf_names import CheckpointRun


def parameters_of(sizes: list[int]) -> dict[str, torch.nn.Parameter]:
    return {f"p{index}": torch.nn.Parameter(torch.ones(size, device="meta")) for index, size in enumerate(sizes)}


def runs_of(parameters: dict[str, torch.nn.Parameter], pieces: int = 1) -> list[CheckpointRun]:
    """Each parameter as `pieces` checkpoint tensors; the contents of the runs don't matter here."""
    return [
        CheckpointRun(f"{name}.{piece}", tuple(parameter.shape), name, 0)
        for name, parameter in parameters.items()
        for piece in range(pieces)
    ]


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60), most=st.integers(1, 12), pieces=st.integers(1, 3))
def test_parts_hold_everything_once_in_order_and_none_is_far_above_its_share(
    sizes: list[int], most: int, pieces: int
) -> None:
    parameters = parameters_of(sizes)
    runs = runs_of(parameters, pieces)
    parts = split_into_parts(parameters, runs, most)
    assert 1 <= len(parts) <= most
    assert [name for part in parts for name in part.names] == [run.name for run in runs]
    stepped = [parameter for part in parts for parameter in part.parameters]
    assert [id(parameter) for parameter in stepped] == [id(parameter) for parameter in parameters.values()]
    for part in parts:
        elements = [parameter.numel() for parameter in part.parameters]
        assert sum(elements) <= sum(sizes) / most + max(elements)


def test_what_is_not_trained_is_in_no_part() -> None:
    parameters = parameters_of([5, 5])
    runs = runs_of(parameters_of([5, 5, 5]))
    assert [name for part in split_into_parts(parameters, runs) for name in part.names] == ["p0.0", "p1.0"]
