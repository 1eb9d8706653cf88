"""How parameters are split into the parts of an optimizer step."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weightlane.trainer.engines.fsdp2.partwise_adamw import split_into_parts
from weightlane.trainer.engines.hf.names import CheckpointRun


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    most=st.integers(1, 12),
    pieces=st.integers(1, 3),
    frozen=st.integers(0, 2),
)
def test_parts_hold_all_that_is_trained_once_in_order_and_none_is_far_above_its_share(
    sizes: list[int], most: int, pieces: int, frozen: int
) -> None:
    parameters = {f"p{index}": torch.nn.Parameter(torch.ones(size, device="meta")) for index, size in enumerate(sizes)}
    names = [(source, f"{source}.{piece}") for source in parameters for piece in range(pieces)]
    others = [("frozen", f"frozen.{index}") for index in range(frozen)]
    runs = [CheckpointRun(name, (1,), source, 0) for source, name in others + names]
    parts = split_into_parts(parameters, runs, most)
    assert 1 <= len(parts) <= most
    assert [name for part in parts for name in part.names] == [name for _, name in names]
    stepped = [parameter for part in parts for parameter in part.parameters]
    assert [id(parameter) for parameter in stepped] == [id(parameter) for parameter in parameters.values()]
    for part in parts:
        elements = [parameter.numel() for parameter in part.parameters]
        assert sum(elements) <= sum(sizes) / most + max(elements)
