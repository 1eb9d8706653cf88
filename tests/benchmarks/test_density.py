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


def test_training_counts_every_step_and_leaves_the_prepared_model_alone(density: ModuleType) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 8)
    kept = [parameter.clone() for parameter in model.parameters()]
    inputs = torch.randn(32, 64)
    runs = [density.train("m", model, lambda m: (m(inputs) - 1).square().mean(), rate, 4) for rate in (1e-2, 1e-6)]
    assert [len(run.density) for run in runs] == [4, 4]
    assert min(runs[0].density) > 0.5 > max(runs[1].density)
    assert runs[0].loss[-1] < runs[0].loss[0]
    assert all(torch.equal(old, new) for old, new in zip(kept, model.parameters(), strict=True))
    assert "| m, 0.0 M | 0.01 |" in density.markdown([density.asdict(run) for run in runs])
