"""The density benchmark counts elements whose bits on the wire changed, at every step, and tied weights once."""

from __future__ import annotations

from types import ModuleType

import torch


def test_a_change_is_any_bit_of_the_wire_and_tied_weights_count_once(density: ModuleType) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    weight = model[0].weight.detach().view(-1)
    weight.copy_(torch.tensor([0.0, float("nan"), 1.0, 1.0, 1e-39, *[0.5] * 11]))
    before = density.wire_bits(model)
    assert sum(tensor.numel() for tensor in before) == 16
    weight[0] = -0.0
    weight[2] = 1.001  # rounds to the same bfloat16
    weight[3] = 1.01
    assert density.changed_share(before, density.wire_bits(model)) == 2 / 16
    assert density.changed_share(before, before) == 0.0
