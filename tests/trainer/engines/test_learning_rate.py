"""Learning rates against torch's own schedulers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.engines.optimizers.settings import learning_rate


@pytest.mark.parametrize(("schedule", "warmup"), [("constant", 4), ("linear", 0), ("cosine", 4)])
def test_schedules_are_those_of_torch(schedule: Any, warmup: int) -> None:
    config = TrainerConfig(
        learning_rate=0.2, lr_warmup_steps=warmup, lr_schedule=schedule, lr_decay_steps=10, lr_final_share=0.1
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.2)
    falling: dict[str, Any] = {
        "constant": LinearLR(optimizer, 1.0, 1.0, 10),
        "linear": LinearLR(optimizer, 1.0, 0.1, 10),
        "cosine": CosineAnnealingLR(optimizer, 10, 0.2 * 0.1),
    }
    rising = LinearLR(optimizer, 1 / 4, 1.0, 3)  # its first step has a quarter, its fourth the whole rate
    optimizer.param_groups[0]["lr"] = 0.2
    expected = []
    scheduler = falling[schedule] if not warmup else SequentialLR(optimizer, [rising, falling[schedule]], [warmup])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the optimizer takes no steps
        for _ in range(warmup + 11):
            expected.append(optimizer.param_groups[0]["lr"])
            scheduler.step()
    assert [learning_rate(config, step) for step in range(warmup + 11)] == pytest.approx(expected)
    end = {"constant": 0.2}.get(schedule, 0.02)
    assert learning_rate(config, 10_000) == pytest.approx(end), "where it stays"


def test_a_schedule_without_a_length_is_refused() -> None:
    with pytest.raises(ValidationError, match="needs lr_decay_steps"):
        TrainerConfig(lr_schedule="cosine")
