"""The gradient of a mini-batch by plain transformers in float64, in one process, and engines compared to it."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_batches import TEMPERATURE, make_samples
from engine_ranks import Teams, checkpoint
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

ROWS = 7
THREE_CALLS = [[0], [3, 1, 2, 4], [6, 5]]
"""An uneven split of the rows into calls."""


@functools.cache
def exact(path: Path, rows: int, loss_name: str) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradient of the whole mini-batch by plain transformers, one sequence at a time, everything in float64.

    The terms of `engine_batches.mixed` and `valued` are written out here once more.
    """
    kind = AutoModelForTokenClassification if loss_name == "valued" else AutoModelForCausalLM
    model = kind.from_pretrained(path, dtype=torch.float64, experts_implementation="eager").eval()
    samples = make_samples(0, rows)
    tokens = sum(len(sample.completion_ids) for sample in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
        advantage = float(np.float32(sample.advantage))  # in which it travels
        if loss_name == "valued":
            hidden = model.model(ids, use_cache=False).last_hidden_state[0, len(sample.prompt_ids) - 1 : -1]
            values = hidden @ model.score.weight[0] + model.score.bias
            loss = loss + (values - advantage).square().sum() / tokens + (hidden * torch.linspace(-1, 1, 16)).sum() / 70
            continue
        logits = model(ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1] / TEMPERATURE
        assert logits.dtype == torch.float64
        logs = torch.log_softmax(logits, -1)
        chosen = logs[range(len(sample.completion_ids)), list(sample.completion_ids)]
        loss = loss - advantage * chosen.sum() / tokens + chosen.square().mean() / rows + (logs.exp() * logs).sum() / 50
    loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
    saved = path.parent / f"{path.name}-gradient-{rows}-{loss_name}"
    model.save_pretrained(saved)  # under the names of a checkpoint
    return float(loss.detach()), checkpoint(saved)


def assert_gradient_is_exact(
    teams: Teams,
    world: int,
    name: str,
    settings: dict[str, Any],
    rows: int,
    calls: list[list[int]],
    limit: float,
    loss: str = "mixed",
) -> None:
    ranks = teams.of(world)
    ranks.setup(name, **{"betas": (0.0, 0.999), "max_grad_norm": 1e9, "micro_batch_tokens": 20, **settings})
    answers = ranks.all("gradient", rows=rows, calls=calls, loss=loss)
    expected, wanted = exact(teams.models[name], rows, loss)
    wanted = {key: value for key, value in wanted.items() if not key.endswith("e_score_correction_bias")}
    found = {key: torch.full(value.shape, torch.nan, dtype=torch.float64) for key, value in wanted.items()}
    for total, slices in answers:
        assert total == pytest.approx(expected, rel=limit)
        for key, starts, data in slices:
            index = tuple(slice(start, start + size) for start, size in zip(starts, data.shape, strict=True))
            found[key][index] = torch.from_numpy(data).double()
    difference = torch.stack([(found[key] - value).norm() for key, value in wanted.items()]).norm()
    norm = torch.stack([value.norm() for value in wanted.values()]).norm()
    assert float(difference / norm) <= limit
