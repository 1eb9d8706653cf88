"""`Fsdp2Engine` in real processes over gloo, against single-process transformers and AdamW."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import TEMPERATURE, make_samples
from engine_ranks import (
    FSDP2_TP2,
    LEARNING_RATE,
    Teams,
    assert_fence_tells_of_changes,
    assert_same,
    checkpoint,
    exhaustive,
    gathered,
)
from transformers import AutoModelForCausalLM
from waiting import HANG_S

from weightlane.ckpt_engines import AddressInUseError
from weightlane.trainer.config import AlgorithmConfig, TrainerConfig
from weightlane.trainer.engines.fsdp2.engine import Fsdp2Engine
from weightlane.trainer.engines.fsdp2.partwise_adamw import PARTS

STEPS = 3


def reference(path: Path, loss: str, steps: int, rows: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights of plain transformers and AdamW on the same batches.

    One sample at a time, with GRPO and supervised loss written out, so that nothing of ours but the samples is used.
    """
    algorithm = AlgorithmConfig()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    losses, norms = [], []
    for step in range(steps):
        samples = make_samples(step, rows)
        total = torch.zeros(())
        for sample in samples:
            ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
            start = len(sample.prompt_ids)
            logits = model(ids, use_cache=False).logits[0, start - 1 : -1] / TEMPERATURE
            logprobs = torch.log_softmax(logits, -1)[torch.arange(len(sample.completion_ids)), ids[0, start:]]
            if loss == "sft":
                total = total - logprobs.sum()
                continue
            ratio = torch.exp(logprobs - torch.tensor(sample.rollout_logprobs))
            clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * sample.advantage
            total = total - torch.minimum(ratio.clamp(max=algorithm.ratio_cap) * sample.advantage, clipped).sum()
        mean = total / sum(len(sample.completion_ids) for sample in samples)
        optimizer.zero_grad()
        mean.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(mean.detach()))
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return losses, norms, weights


@pytest.mark.parametrize("world", [exhaustive(1), 2])
@pytest.mark.parametrize(
    ("name", "loss", "rows", "extra"),
    [
        ("qwen3-tied", "policy", 6, {}),
        ("llama-untied", "policy", 7, {"micro_batch_tokens": 30, "activation_checkpointing": True}),
    ],
    ids=["whole batch", "recomputation"],
)
def test_training_equals_plain_transformers_and_adamw(
    teams: Teams, world: int, name: str, loss: str, rows: int, extra: dict[str, Any]
) -> None:
    ranks = teams.of(world)
    ranks.setup(name, **extra)
    reports = ranks.all("train", first=0, count=STEPS, rows=rows, loss=loss)
    losses, norms, weights = reference(teams.models[name], loss, STEPS, rows)
    assert all(report == reports[0] for report in reports)
    assert [report["loss"] for report in reports[0]] == pytest.approx(losses, abs=1e-5)
    assert [report["norm"] for report in reports[0]] == pytest.approx(norms, rel=1e-4)
    trained = gathered(ranks)
    assert trained.keys() == weights.keys()
    for key, tensor in trained.items():
        torch.testing.assert_close(tensor, weights[key], atol=1e-5, rtol=0)


@pytest.mark.parametrize("world", [1, 2])
def test_fused_experts_are_published_fenced_and_exported_one_by_one(teams: Teams, tmp_path: Path, world: int) -> None:
    """Names as on disk; the model keeps the experts of a layer in two parameters."""
    ranks, saved = teams.of(world), checkpoint(teams.models["qwen2-moe"])
    ranks.setup("qwen2-moe")
    assert_same(gathered(ranks, "bfloat16"), saved)
    assert 1 < len(assert_fence_tells_of_changes(ranks, saved)) <= PARTS
    ranks.all("export", directory=tmp_path / "exported")
    assert_same(checkpoint(tmp_path / "exported"), gathered(ranks))


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-moe"])
def test_a_step_in_parts_is_one_whole_step_bit_for_bit(teams: Teams, name: str) -> None:
    ranks = teams.of(2)
    ranks.setup(name, lr_warmup_steps=3, max_grad_norm=0.1)
    assert ranks.all("train_beside_one_whole_step", count=5) == [[[]] * 5] * 2


def test_a_taken_port_is_a_typed_error(models: dict[str, Path]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        engine = Fsdp2Engine(TrainerConfig(device="cpu"), 0, 1, holder.getsockname())
        with pytest.raises(AddressInUseError, match="taken"):
            engine.setup(models["qwen3-tied"], seed=0)
        engine.close()


def test_a_connection_that_gloo_loses_when_the_ranks_join_is_made_again_and_no_group_waits_longer_than_it_is_allowed_to(
    teams: Teams,
) -> None:
    with teams.new(2) as ranks:
        ranks.all("lose_first_connection")
        ranks.setup("qwen3-tied", **FSDP2_TP2)
        ranks.all("train", first=0, count=1)
        assert ranks.all("group_timeouts") == [[HANG_S] * 3] * 2
