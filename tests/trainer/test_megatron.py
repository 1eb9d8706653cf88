"""`MegatronEngine` in every layout: against `Fsdp2Engine`, transformers' checkpoints, and mbridge."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import TRAINER, Parity, Ranks, assert_same, checkpoint, gathered
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.megatron

LAYOUTS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "one rank": (1, "qwen3-tied", {}),
    "dp2": (2, "qwen3-tied", {}),
    "dp2, distributed optimizer": (2, "qwen3-untied", {"distributed_optimizer": True}),
    "tp2": (2, "llama-untied", {"tensor_parallel": 2}),
    "tp2, sequence parallel": (2, "qwen3-tied", {"tensor_parallel": 2, "sequence_parallel": True}),
    "pp2": (2, "qwen3-untied", {"pipeline_parallel": 2}),
    "pp2, tied": (2, "qwen3-tied", {"pipeline_parallel": 2}),
    "pp2, vpp2, tied": (2, "qwen3-tied", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
    "tp2, pp2, tied": (4, "qwen3-tied", {"tensor_parallel": 2, "pipeline_parallel": 2}),
    "tp2, dp2, distributed optimizer": (4, "qwen3-tied", {"tensor_parallel": 2, "distributed_optimizer": True}),
    "pp2, dp2, distributed optimizer, tied": (
        4,
        "qwen3-tied",
        {"pipeline_parallel": 2, "distributed_optimizer": True},
    ),
    "experts, pp2": (2, "qwen3-moe", {"pipeline_parallel": 2}),
    "ep2": (2, "qwen3-moe", {"expert_parallel": 2}),
    "ep2, dp4, distributed optimizer": (4, "qwen3-moe", {"expert_parallel": 2, "distributed_optimizer": True}),
    "tp2, ep2": (2, "qwen3-moe", {"tensor_parallel": 2, "sequence_parallel": True, "expert_parallel": 2}),
}


def megatron(layout: dict[str, Any], **trainer: Any) -> dict[str, Any]:
    return {**TRAINER, "engine": "megatron", "megatron": layout, **trainer}


@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_twenty_steps_are_those_of_fsdp2_and_shards_are_the_checkpoint_before_and_after(
    ranks_of: Callable[[int], Ranks], parity: Parity, tmp_path: Path, layout: str
) -> None:
    world, name, settings = LAYOUTS[layout]
    parity.check(ranks_of(world), name, megatron(settings), tmp_path)


def test_an_exported_mixture_of_experts_is_the_same_model_in_transformers(
    ranks_of: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path
) -> None:
    ranks = ranks_of(2)
    ranks.all("setup", model=str(models["qwen3-moe"]), trainer=megatron({"expert_parallel": 2}))
    ranks.all("export", directory=str(tmp_path / "exported"))
    theirs = AutoModelForCausalLM.from_pretrained(models["qwen3-moe"]).state_dict()
    ours, report = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    assert_same(dict(ours.state_dict()), dict(theirs))


@pytest.mark.parametrize(
    ("world", "name", "settings"),
    [
        (2, "qwen3-tied", {"tensor_parallel": 2}),
        (2, "qwen3-tied", {"distributed_optimizer": True}),
        (2, "qwen3-untied", {"pipeline_parallel": 2, "virtual_pipeline": 2}),
        (4, "qwen3-moe", {"expert_parallel": 2, "distributed_optimizer": True}),
    ],
    ids=["tp2", "distributed optimizer", "vpp2", "ep2, distributed optimizer"],
)
def test_bfloat16_forward_uses_the_master_weights_rounded(
    ranks_of: Callable[[int], Ranks],
    models: dict[str, Path],
    tmp_path: Path,
    world: int,
    name: str,
    settings: dict[str, Any],
) -> None:
    """So what is published in bfloat16 is, bit for bit, what the trainer computes with; masters themselves lose no bit."""
    ranks = ranks_of(world)
    ranks.all("setup", model=str(models[name]), trainer=megatron(settings, compute_dtype="bfloat16"))
    for moment in ("loaded", "trained"):
        masters = gathered(ranks, tmp_path / moment)
        if moment == "loaded":
            assert_same(masters, checkpoint(models[name]))
        ranks.all("forward_weights", file=str(tmp_path / "forward"))
        seen = dict.fromkeys(masters, 0)
        for rank in range(world):
            for tensor, starts, data in torch.load(f"{tmp_path / 'forward'}.{rank}"):
                index = tuple(slice(start, start + size) for start, size in zip(starts, data.shape, strict=True))
                assert data.dtype == torch.bfloat16
                assert torch.equal(data, masters[tensor][index].bfloat16()), tensor
                seen[tensor] += data.numel()
        assert all(seen[tensor] >= masters[tensor].numel() for tensor in masters)
        ranks.all("train", first=0, count=2)


@pytest.mark.parametrize(("scale", "dtype"), [(1.0, "float32"), (200.0, "float32"), (5.0, "bfloat16")])
def test_logprobs_over_a_split_vocabulary_are_those_over_the_whole_one(
    ranks_of: Callable[[int], Ranks], models: dict[str, Path], scale: float, dtype: str
) -> None:
    """Padding, however large its logits, counts for nothing; half precision is only what the logits come in."""
    ranks = ranks_of(2)
    ranks.all("setup", model=str(models["qwen3-tied"]), trainer=megatron({"tensor_parallel": 2}))
    for report in ranks.all("vocab_logprobs", scale=scale, dtype=dtype):
        assert report["float32"] == 1.0
        assert report["value"] <= 1e-6 * max(1.0, scale)
        assert report["slope"] <= (1e-6 if dtype == "float32" else 1e-2)


def test_gradients_of_several_calls_add_up(ranks_of: Callable[[int], Ranks], models: dict[str, Path]) -> None:
    """Also over data parallel ranks, which exchange gradients once per step."""
    norms = []
    for trainer in (
        {**TRAINER},
        megatron({"pipeline_parallel": 2}),
        megatron({}),
        megatron({"distributed_optimizer": True}),
    ):
        ranks = ranks_of(2)
        ranks.all("setup", model=str(models["qwen3-tied"]), trainer=trainer)
        norms.append(ranks.all("train_twice")[0])
    assert norms == [pytest.approx(norms[0], rel=1e-5)] * 4


def test_recomputed_activations_give_the_same_gradients(
    ranks_of: Callable[[int], Ranks], models: dict[str, Path]
) -> None:
    ranks = ranks_of(2)
    reports = []
    for recompute in (False, True):
        settings = {"tensor_parallel": 2, "sequence_parallel": True}
        trainer = megatron(settings, activation_checkpointing=recompute)
        ranks.all("setup", model=str(models["qwen3-tied"]), trainer=trainer)
        reports.append(ranks.all("train", first=0, count=2)[0])
    assert reports[0] == reports[1]


MOVES: list[tuple[str, tuple[int, dict[str, Any]], tuple[int, dict[str, Any]]]] = [
    (
        "qwen3-tied",
        (4, {"tensor_parallel": 2, "pipeline_parallel": 2}),
        (2, {"distributed_optimizer": True}),
    ),
    ("qwen3-tied", (4, {"pipeline_parallel": 2, "distributed_optimizer": True}), (1, {})),
    ("qwen3-untied", (2, {"distributed_optimizer": True}), (2, {"pipeline_parallel": 2, "virtual_pipeline": 2})),
    ("qwen3-moe", (2, {"expert_parallel": 2}), (2, {"pipeline_parallel": 2})),
]


@pytest.mark.parametrize(("name", "before", "after"), MOVES)
def test_a_saved_run_goes_on_in_another_layout_with_the_same_weights_and_moments(
    ranks_of: Callable[[int], Ranks],
    models: dict[str, Path],
    tmp_path: Path,
    name: str,
    before: tuple[int, dict[str, Any]],
    after: tuple[int, dict[str, Any]],
) -> None:
    old, new = ranks_of(before[0]), ranks_of(after[0])
    old.all("setup", model=str(models[name]), trainer=megatron(before[1]))
    old.all("train", first=0, count=3)
    old.all("save", directory=str(tmp_path / "state"))
    weights = gathered(old, tmp_path / "old")
    reports = old.all("train", first=3, count=3)[0]
    new.all("setup", model=str(models[name]), trainer=megatron(after[1]))
    assert new.all("load", directory=str(tmp_path / "state")) == [3] * after[0]
    assert_same(gathered(new, tmp_path / "new"), weights)
    for mine, theirs in zip(new.all("train", first=3, count=3)[0], reports, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4, abs=1e-4)


def test_a_state_of_another_model_is_refused_and_changes_nothing(
    ranks_of: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path
) -> None:
    ranks = ranks_of(2)
    ranks.all("setup", model=str(models["qwen3-tied"]), trainer=megatron({}))
    ranks.all("save", directory=str(tmp_path / "state"))
    ranks.all("setup", model=str(models["qwen3-untied"]), trainer=megatron({"tensor_parallel": 2}))
    for rank in range(2):
        ranks.tell(rank, "load", directory=str(tmp_path / "state"))
    for rank in range(2):
        answer = ranks.answer(rank)
        assert answer["error"] == "ConfigError"
        assert "lacks some of weight|lm_head.weight" in answer["message"]
    assert_same(gathered(ranks, tmp_path / "shards"), checkpoint(models["qwen3-untied"]))
    ranks.all("train", first=0, count=1)


def test_a_layout_that_does_not_fit_the_model_is_refused_by_every_rank_at_once(
    ranks_of: Callable[[int], Ranks], models: dict[str, Path]
) -> None:
    ranks = ranks_of(2)
    for rank in range(2):
        ranks.tell(rank, "setup", model=str(models["qwen3-tied"]), trainer=megatron({"expert_parallel": 2}))
    for rank in range(2):
        answer = ranks.answer(rank)
        assert answer["error"] == "ConfigError"
        assert "expert_parallel=2, but the model has no experts" in answer["message"]
