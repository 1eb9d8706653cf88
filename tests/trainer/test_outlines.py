"""What ranks will hold is known before there are any: exactly what real ones say."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_ranks import Ranks

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.outlines import outlined_placements

TP_EP = {"tensor_parallel": 2, "expert_parallel": 2, "sequence_parallel": True}
PP = {"pipeline_parallel": 2, "virtual_pipeline": 2, "distributed_optimizer": True}


@pytest.mark.parametrize(
    ("model", "world", "trainer"),
    [
        ("qwen3-moe", 2, {"engine": "fsdp2"}),
        ("qwen3-tied", 4, {"engine": "fsdp2", "fsdp2": {"tensor_parallel": 2}}),
        pytest.param("qwen3-moe", 2, {"engine": "megatron", "megatron": TP_EP}, marks=pytest.mark.megatron),
        pytest.param(
            "qwen3-tied",
            4,
            {"engine": "megatron", "megatron": PP, "compute_dtype": "bfloat16"},
            marks=pytest.mark.megatron,
        ),
    ],
    ids=["fsdp2", "fsdp2 over tensor parallelism", "tensors and experts", "pipeline and distributed optimizer"],
)
def test_an_outline_is_exactly_what_real_ranks_hold(
    model: str, world: int, trainer: dict[str, Any], models: dict[str, Path], ranks_of: Callable[[int], Ranks]
) -> None:
    ranks = ranks_of(world)
    ranks.all("setup", model=str(models[model]), trainer=trainer)
    outlined = outlined_placements(TrainerConfig(ranks=world, **trainer), models[model], "bfloat16")
    assert [placement.to_plain() for placement in outlined] == ranks.all("placement", wire_dtype="bfloat16")


def test_what_an_outline_cannot_be_made_of_is_refused_in_the_engines_words(models: dict[str, Path]) -> None:
    config = TrainerConfig(ranks=3, fsdp2={"tensor_parallel": 2})
    with pytest.raises(ConfigError, match=r"trainer.fsdp2.tensor_parallel = 2 does not divide"):
        outlined_placements(config, models["qwen3-tied"], "bfloat16")


def test_an_engine_that_must_run_to_know_says_so(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text(
        "from weightlane.trainer.engine import TrainingEngine\n"
        "names = TrainingEngine.__abstractmethods__\n"
        "Theirs = type('Theirs', (TrainingEngine,), {name: None for name in names})\n"
    )
    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[weightlane.training_engines]\ntheirs = theirs:Theirs\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ConfigError, match="'theirs' cannot say what its ranks hold without running"):
        outlined_placements(TrainerConfig(engine="theirs"), models["qwen3-tied"], "bfloat16")


def test_an_outline_that_takes_too_long_is_given_up(models: dict[str, Path]) -> None:
    with pytest.raises(DeadlineExceededError, match="what the 2 trainer ranks hold was not found in 0 s"):
        outlined_placements(TrainerConfig(ranks=2), models["qwen3-tied"], "bfloat16", timeout_s=0.2)
