"""How parameters are split into the parts of an optimizer step."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane.trainer.fsdp2_parts import PARTS, PartwiseAdamW, split_into_parts
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


def test_a_model_of_many_layers_has_parts_of_about_one_size() -> None:
    parameters = parameters_of([100] * 64)
    parts = split_into_parts(parameters, runs_of(parameters))
    assert [len(part.parameters) for part in parts] == [64 // PARTS] * PARTS


def test_what_is_not_trained_is_in_no_part() -> None:
    parameters = parameters_of([5, 5])
    runs = runs_of(parameters_of([5, 5, 5]))
    assert [name for part in split_into_parts(parameters, runs) for name in part.names] == ["p0.0", "p1.0"]


def test_the_state_of_a_parameter_is_found_in_its_part_and_no_other_has_one() -> None:
    parameters = {name: torch.nn.Parameter(torch.ones(3)) for name in ("a", "b")}
    optimizer = PartwiseAdamW(
        split_into_parts(parameters, runs_of(parameters)), learning_rate=0.1, betas=(0.9, 0.95), weight_decay=0.0
    )
    for parameter in parameters.values():
        parameter.grad = torch.ones(3)
    optimizer.step(lambda names: None)
    for parameter in parameters.values():
        assert float(optimizer.state_of(parameter)["step"]) == 1.0
        assert bool((optimizer.state_of(parameter)["exp_avg"] != 0).all())
    with pytest.raises(KeyError):
        optimizer.state_of(torch.nn.Parameter(torch.ones(3)))
