"""An outline gives the placements of ranks before any rank exists, exactly as real ranks report them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from engine_ranks import FSDP2_TP2, Teams, megatron
from installed import install

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.dispatch.planned_placements import outlined_placements

TP_EP = megatron({"tensor_parallel": 2, "expert_parallel": 2, "sequence_parallel": True})
ALONE = {"rank": 2, "publish": "adapter"}
PP = megatron({"pipeline_parallel": 2, "virtual_pipeline": 2, "distributed_optimizer": True}, compute_dtype="bfloat16")


@pytest.mark.parametrize(
    ("model", "world", "trainer"),
    [
        pytest.param("qwen3-moe", 2, {"engine": "fsdp2"}, id="fsdp2"),
        pytest.param("qwen3-moe", 2, TP_EP, id="tensors and experts", marks=pytest.mark.megatron),
        pytest.param("qwen3-tied", 4, PP, id="pipeline and distributed optimizer", marks=pytest.mark.megatron),
        pytest.param("qwen3-tied", 4, {**PP, "lora": ALONE}, id="adapter over stages", marks=pytest.mark.megatron),
        pytest.param("qwen3-tied", 4, {**FSDP2_TP2, "lora": ALONE}, id="adapter over tensor parallelism"),
    ],
)
def test_an_outline_is_exactly_what_real_ranks_hold(
    model: str, world: int, trainer: dict[str, Any], teams: Teams
) -> None:
    with teams.new(world, present=1) as fresh:
        (outlined,) = fresh.all("outline", model=str(teams.models[model]), trainer=trainer)
    ranks = teams.of(world)
    ranks.setup(model, **trainer)
    assert outlined == ranks.all("placement", wire_dtype="bfloat16")


def test_an_engine_that_must_run_to_know_is_refused_in_its_own_words(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (
        "from weightlane.trainer.engines.contract import TrainingEngine\n"
        "names = TrainingEngine.__abstractmethods__\n"
        "Theirs = type('Theirs', (TrainingEngine,), {name: None for name in names})\n"
    )
    install(tmp_path, "theirs", source, "theirs = theirs:Theirs", "weightlane.training_engines")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="'theirs' cannot say what its ranks hold without running"):
        outlined_placements(TrainerConfig(engine="theirs"), models["qwen3-tied"], "bfloat16")


def test_an_outline_that_takes_too_long_is_given_up(models: dict[str, Path]) -> None:
    with pytest.raises(DeadlineExceededError, match="what the 2 trainer ranks hold was not found in 0 s"):
        outlined_placements(TrainerConfig(ranks=2), models["qwen3-tied"], "bfloat16", timeout_s=0.05)
