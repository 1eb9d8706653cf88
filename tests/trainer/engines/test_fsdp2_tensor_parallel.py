"""FSDP2 over tensor parallelism trains as FSDP2 by itself does, and its slices are the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_ranks import FSDP2_TP2, Teams, assert_same, assert_twenty_steps_are_those_of_one_rank, exhaustive, gathered

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.engines.fsdp2.engine import Fsdp2Engine


@pytest.mark.parametrize(
    ("world", "name"),
    [(2, "qwen3-moe"), (4, "qwen3-tied"), exhaustive(2, "llama-untied"), exhaustive(4, "qwen3-untied")],
)
def test_twenty_steps_are_those_of_one_rank_and_shards_are_the_checkpoint_before_and_after(
    teams: Teams, tmp_path: Path, world: int, name: str
) -> None:
    assert_twenty_steps_are_those_of_one_rank(teams, world, name, tmp_path, **FSDP2_TP2)


def test_a_saved_state_goes_on_without_tensor_parallelism(teams: Teams, tmp_path: Path) -> None:
    ranks = teams.of(2)
    ranks.setup("qwen3-tied", **FSDP2_TP2)
    ranks.all("train", first=0, count=2)
    ranks.all("save", directory=tmp_path / "state")
    weights = gathered(ranks)
    ranks.setup("qwen3-tied")
    ranks.all("load", directory=tmp_path / "state")
    assert_same(gathered(ranks), weights)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"ranks": 3, "fsdp2": {"tensor_parallel": 2}}, "does not divide"),
        ({"ranks": 8, "fsdp2": {"tensor_parallel": 8}}, "num_attention_heads|num_key_value_heads"),
    ],
)
def test_a_degree_that_does_not_fit_is_refused_before_anything_starts(
    models: dict[str, Path], settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        Fsdp2Engine.check(TrainerConfig(**settings), models["qwen3-tied"])
