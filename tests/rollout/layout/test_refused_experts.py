"""Experts that cannot be divided between ranks are refused in words; `test_trainers_to_vllm.py` has those that can be."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError
from running_worker import started
from tiny_models import make_qwen3, make_qwen3_moe

from weightlane.ckpt_engines import ConfigError
from weightlane.rollout import RolloutConfig, RolloutWorker

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize(
    ("ranks", "experts_of_model", "expert_parallel", "message"),
    [
        (2, 0, True, "The model has no experts: leave rollout.expert_parallel (--ep) off."),
        (4, 2, True, "2 experts cannot be divided between 4 ranks. Set rollout.tensor_parallel (--tp) to at most 2."),
    ],
)
def test_what_cannot_be_divided_is_refused_in_words(
    ranks: int, experts_of_model: int, expert_parallel: bool, message: str, tmp_path: Path
) -> None:
    moe = experts_of_model > 0
    model = make_qwen3_moe(tmp_path, seed=0, experts=experts_of_model) if moe else make_qwen3(tmp_path, seed=0)
    worker = RolloutWorker("rollout-0", RolloutConfig(tensor_parallel=ranks, expert_parallel=expert_parallel), model)
    with pytest.raises(ConfigError) as raised, started(worker):
        raise AssertionError("it started")
    assert message in str(raised.value)


def test_experts_are_divided_between_more_than_one_rank() -> None:
    with pytest.raises(ValidationError, match="set tensor_parallel to more than 1"):
        RolloutConfig(expert_parallel=True)
