"""What a trainer rank adds to its training engine."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from weightlane.trainer import AlgorithmConfig, Sample, TrainBatch, TrainerConfig
from weightlane.trainer.rank import TrainerRank


def test_no_part_of_the_parameters_changes_before_the_publisher_has_read_it() -> None:
    parts, done = [["embed", "norm"], ["head"], ["layer"]], []

    class Publisher:
        def fence(self, names: Collection[str]) -> float:
            done.append(("read", list(names)))
            return 0.25

    class Engine:
        step = 1

        def forward_backward(self, *_: Any) -> dict[str, float]:
            return {"loss": 0.5}

        def optim_step(self, before_change: Callable[[Collection[str]], None]) -> float:
            for part in parts:
                before_change(part)
                done.append(("changed", part))
            return 2.0

    rank: Any = TrainerRank(TrainerConfig(), AlgorithmConfig(), 0, 1)
    rank._engine, rank._publisher = Engine(), Publisher()
    report = rank.train_step(TrainBatch((Sample((1,), (2,), (-1.0,), 1.0),)))
    assert done == [(what, part) for part in parts for what in ("read", "changed")]
    assert (report.step, report.metrics, report.grad_norm, report.fence_s) == (1, {"loss": 0.5}, 2.0, 0.75)
