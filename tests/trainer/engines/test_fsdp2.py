"""`Fsdp2Engine` in real processes over gloo, beyond the conformance suite, which compares it with transformers and AdamW."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import (
    FSDP2_CP2,
    FSDP2_TP2,
    Teams,
    assert_fence_tells_of_changes,
    assert_same,
    assert_steps_are_those_of_one_rank,
    assert_steps_are_torchs_and_a_saved_run_continues,
    checkpoint,
    exhaustive,
    gathered,
)
from transformers import CohereConfig, CohereForCausalLM
from waiting import HANG_S

from weightlane.ckpt_engines import AddressInUseError, ClosedError, ConfigError
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.engines.fsdp2.engine import Fsdp2Engine
from weightlane.trainer.engines.fsdp2.mesh import parallel_styles
from weightlane.trainer.engines.fsdp2.optimizers import PARTS


def test_fused_experts_are_published_and_fenced_one_by_one(teams: Teams) -> None:
    """Names as on disk; the model keeps the experts of a layer in two parameters."""
    ranks, saved = teams.of(2), checkpoint(teams.models["qwen2-moe"])
    ranks.setup("qwen2-moe")
    assert_same(gathered(ranks, "bfloat16"), saved)
    assert 1 < len(assert_fence_tells_of_changes(ranks, saved)) <= PARTS


@pytest.mark.parametrize("optimizer", ["adamw", *map(exhaustive, ("adamw_bf16", "muon", "adamw_8bit"))])
def test_a_step_in_parts_is_one_whole_step_bit_for_bit_and_a_saved_run_continues_so(
    teams: Teams, tmp_path: Path, optimizer: str
) -> None:
    settings = {"optimizer": optimizer, "muon_momentum": 0.9, "max_grad_norm": 0.1}
    assert_steps_are_torchs_and_a_saved_run_continues(teams, "qwen2-moe", tmp_path, **settings)


def test_a_taken_port_is_a_typed_error(models: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        engine = Fsdp2Engine(TrainerConfig(device="cpu"), 0, 1, holder.getsockname())
        with pytest.raises(AddressInUseError, match="taken"):
            engine.setup(models["qwen3-tied"], seed=0)
        engine.close()
        with pytest.raises(ClosedError):
            engine.steps_of()


def test_a_connection_that_gloo_loses_when_the_ranks_join_is_made_again_and_no_group_waits_longer_than_it_is_allowed_to(
    teams: Teams,
) -> None:
    with teams.new(2) as ranks:
        ranks.all("lose_first_connection")
        ranks.setup("qwen3-tied", **FSDP2_TP2)
        assert_same(gathered(ranks), checkpoint(teams.models["qwen3-tied"]))
        assert ranks.all("group_timeouts") == [[HANG_S] * 3] * 2


@pytest.mark.parametrize(
    ("world", "name", "layout"),
    [
        (2, "glm4-moe", FSDP2_TP2),
        exhaustive(2, "qwen3-moe", FSDP2_CP2),
        exhaustive(4, "qwen3-tied", FSDP2_TP2),
        exhaustive(4, "qwen3-tied", FSDP2_CP2),
        exhaustive(4, "deepseek-v3", {"fsdp2": {"context_parallel": 4}}),
        exhaustive(4, "qwen3-untied", {"fsdp2": {"context_parallel": 2, "tensor_parallel": 2}}),
    ],
)
def test_steps_over_tensor_and_context_parallelism_are_those_of_one_rank_and_shards_are_the_checkpoint_before_and_after(
    teams: Teams, tmp_path: Path, world: int, name: str, layout: dict[str, Any]
) -> None:
    """A saved state loads without either, too."""
    assert_steps_are_those_of_one_rank(teams, world, name, tmp_path, **layout)
    ranks = teams.of(world)
    ranks.all("save", directory=tmp_path / "state")
    weights = gathered(ranks)
    ranks.setup(name)
    ranks.all("load", directory=tmp_path / "state")
    assert_same(gathered(ranks), weights)


def test_ranks_that_share_tokens_have_no_dropout_and_notice_the_death_of_one_in_the_middle_of_a_pass(
    teams: Teams,
) -> None:
    with teams.new(2) as ranks:
        ranks.setup("qwen3-tied", **FSDP2_CP2)
        ranks.all_fail("ConfigError", "trains without dropout", "train_with_dropout", mode=True)
        ranks.all("train", first=0, count=1)
        ranks.tell(1, "die_in_gather", number=3)
        ranks.tell(0, "train", first=1, count=1)
        answer = ranks.answer(0)
        assert answer.get("error") in {"PeerLostError", "TransportError"}, answer


def test_a_degree_that_does_not_fit_is_refused_before_anything_starts(models: dict[str, Path]) -> None:
    for ranks, layout, says in (
        (3, {"tensor_parallel": 2}, "does not divide"),
        (8, {"tensor_parallel": 8}, "num_attention_heads|num_key_value_heads"),
        (6, {"tensor_parallel": 2, "context_parallel": 2}, "tensor_parallel = 2 x trainer.*context_parallel = 2 does"),
        (2, {"context_parallel": 2, "packing": "off"}, "context_parallel is 2, which needs packed sequences"),
    ):
        config = TrainerConfig(ranks=ranks, fsdp2=layout)
        with pytest.raises(ConfigError, match=says):
            Fsdp2Engine.check(config, models["qwen3-tied"])
    with torch.device("meta"), pytest.raises(ConfigError, match="q_norm"):  # each head has a norm of its own
        parallel_styles(CohereForCausalLM(CohereConfig(num_hidden_layers=1, use_qk_norm=True)))
