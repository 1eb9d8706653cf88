"""An outline gives the placements of ranks before any rank exists, exactly as real ranks report them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_ranks import FSDP2_CP2, FSDP2_TP2, Teams, case, exhaustive, megatron

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.dispatch.planned_placements import outlined_placements

pytestmark = pytest.mark.usefixtures("forked_answers")

TP_EP = {"tensor_parallel": 2, "expert_parallel": 2, "sequence_parallel": True}
STAGES = {"pipeline_parallel": 2, "virtual_pipeline": 2, "distributed_optimizer": True}
ADAPTER = {"rank": 2, "publish": "adapter"}


@pytest.mark.parametrize(
    ("model", "trainer"),
    [
        case("qwen3-moe", FSDP2_TP2, id="fsdp2-tp2"),
        exhaustive("qwen3-moe", FSDP2_CP2, id="fsdp2-cp2"),
        exhaustive("qwen3-moe", megatron(TP_EP), id="tensors and experts"),
        case("qwen3-tied", megatron(STAGES, compute_dtype="bfloat16", lora=ADAPTER), id="adapter over stages"),
    ],
)
def test_an_outline_is_exactly_what_real_ranks_hold(model: str, trainer: dict[str, Any], teams: Teams) -> None:
    outlined = outlined_placements(TrainerConfig(ranks=2, **trainer), teams.models[model], "bfloat16")
    ranks = teams.of(2)
    ranks.setup(model, **trainer)
    assert [each.to_plain() for each in outlined] == ranks.all("placement", wire_dtype="bfloat16")


def test_an_outline_that_fails_or_takes_too_long_is_a_typed_error(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be built with the head"):
        outlined_placements(TrainerConfig(ranks=2), tmp_path, "bfloat16")
    with pytest.raises(DeadlineExceededError, match="what the 2 trainer ranks hold was not found in 0 s"):
        outlined_placements(TrainerConfig(ranks=2), models["qwen3-tied"], "bfloat16", timeout_s=0.0)
