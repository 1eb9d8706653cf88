"""`Fsdp2Engine` in real processes over gloo, against single-process transformers and AdamW."""

from __future__ import annotations

import runpy
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import (
    COLLECTIVE_S,
    LEARNING_RATE,
    START_S,
    TRAINER,
    VOCAB,
    WORKER,
    Ranks,
    assert_same,
    checkpoint,
    gathered,
)
from transformers import AutoModelForCausalLM

from weightlane.trainer.config import AlgorithmConfig, TrainerConfig
from weightlane.trainer.fsdp2 import Fsdp2Engine
from weightlane.trainer.fsdp2_parts import PARTS

STEPS = 3
RanksOf = Callable[[int], Ranks]


@pytest.fixture(params=[1, 2], ids=["world1", "world2"])
def ranks(request: pytest.FixtureRequest, ranks_of: RanksOf) -> Ranks:
    return ranks_of(request.param)


def reference(path: Path, loss: str, steps: int, rows: int) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Losses, gradient norms and final weights of plain transformers and AdamW on the same batches.

    One sample at a time, with GRPO and supervised loss written out, so that nothing of ours but the samples is used.
    """
    make_batch = runpy.run_path(str(WORKER))["make_batch"]
    algorithm = AlgorithmConfig()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
    losses, norms = [], []
    for step in range(steps):
        batch = make_batch(step, rows, VOCAB)
        total = torch.zeros(())
        for sample in batch.samples:
            ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
            start = len(sample.prompt_ids)
            logits = model(ids, use_cache=False).logits[0, start - 1 : -1] / batch.temperature
            logprobs = torch.log_softmax(logits, -1)[torch.arange(len(sample.completion_ids)), ids[0, start:]]
            if loss == "sft":
                total = total - logprobs.sum()
                continue
            ratio = torch.exp(logprobs - torch.tensor(sample.rollout_logprobs))
            clipped = ratio.clamp(1 - algorithm.clip_low, 1 + algorithm.clip_high) * sample.advantage
            total = total - torch.minimum(ratio.clamp(max=algorithm.ratio_cap) * sample.advantage, clipped).sum()
        mean = total / batch.loss_tokens
        optimizer.zero_grad()
        mean.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(mean.detach()))
    weights = {name: tensor.detach() for name, tensor in model.named_parameters()}
    return losses, norms, weights


@pytest.mark.parametrize(
    ("name", "loss", "rows", "extra"),
    [
        ("qwen3-tied", "grpo", 6, {}),
        ("qwen3-untied", "sft", 5, {"micro_batch_tokens": 20}),
        ("llama-untied", "grpo", 7, {"micro_batch_tokens": 30, "activation_checkpointing": True}),
        ("llama-untied", "grpo", 1, {"reshard_after_forward": False}),  # with two ranks, one has nothing but padding
    ],
    ids=["whole batch", "micro batches", "recomputation", "idle rank"],
)
def test_training_equals_plain_transformers_and_adamw(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path, name: str, loss: str, rows: int, extra: dict[str, Any]
) -> None:
    ranks.all("setup", model=str(models[name]), trainer={**TRAINER, **extra})
    reports = ranks.all("train", first=0, count=STEPS, rows=rows, loss=loss)
    losses, norms, weights = reference(models[name], loss, STEPS, rows)
    assert all(report == reports[0] for report in reports)
    assert [report["loss"] for report in reports[0]] == pytest.approx(losses, abs=1e-5)
    assert [report["norm"] for report in reports[0]] == pytest.approx(norms, rel=1e-4)
    trained = gathered(ranks, tmp_path / "shards")
    assert trained.keys() == weights.keys()
    for key, tensor in trained.items():
        torch.testing.assert_close(tensor, weights[key], atol=1e-5, rtol=0)


def test_fused_experts_are_published_one_by_one(ranks: Ranks, models: dict[str, Path], tmp_path: Path) -> None:
    """Names as on disk, also in an export."""
    ranks.all("setup", model=str(models["qwen2-moe"]), trainer=TRAINER)
    assert_same(gathered(ranks, tmp_path / "loaded", "bfloat16"), checkpoint(models["qwen2-moe"]))
    ranks.all("train", first=0, count=1)
    ranks.all("export", directory=str(tmp_path / "exported"))
    assert_same(checkpoint(tmp_path / "exported"), gathered(ranks, tmp_path / "trained"))


def test_training_state_loads_with_another_number_of_ranks(
    ranks_of: RanksOf, models: dict[str, Path], tmp_path: Path
) -> None:
    one, two = ranks_of(1), ranks_of(2)
    two.all("setup", model=str(models["llama-untied"]), trainer=TRAINER)
    two.all("train", first=0, count=1)
    two.all("save", directory=str(tmp_path / "state"))
    one.all("setup", model=str(models["llama-untied"]), trainer=TRAINER)
    assert one.all("load", directory=str(tmp_path / "state")) == [1]
    assert_same(gathered(one, tmp_path / "one"), gathered(two, tmp_path / "two"))
    two.all("train", first=1, count=1)
    one.all("train", first=1, count=1)
    left, right = gathered(one, tmp_path / "one"), gathered(two, tmp_path / "two")
    for name, tensor in left.items():
        torch.testing.assert_close(tensor, right[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-moe"])
def test_the_fence_names_every_checkpoint_tensor_once_and_before_it_changes(
    ranks: Ranks, models: dict[str, Path], name: str
) -> None:
    """The mixture of experts keeps its experts in fused parameters, each of which is several tensors of the checkpoint."""
    ranks.all("setup", model=str(models[name]), trainer=TRAINER)
    reports = ranks.all("fence")
    order = [[call["named"] for call in report["calls"]] for report in reports]
    assert all(parts == order[0] for parts in order)
    assert 1 < len(order[0]) <= PARTS
    named = [tensor for part in order[0] for tensor in part]
    assert sorted(named) == sorted(checkpoint(models[name]))
    for report in reports:
        assert report["published"] == [tensor for tensor in named if tensor in set(report["published"])]
        assert report["changed"] == report["published"]
        may_change: set[str] = set()
        for call in report["calls"]:
            assert set(call["changed_before"]) == may_change & set(report["published"])
            may_change |= set(call["named"])
        assert (report["error"], report["step"]) == ("", 1)


@pytest.mark.parametrize("name", ["qwen3-tied", "qwen2-moe"])
def test_a_step_in_parts_is_one_whole_step_bit_for_bit(ranks: Ranks, models: dict[str, Path], name: str) -> None:
    trainer = {**TRAINER, "lr_warmup_steps": 3, "max_grad_norm": 0.1}
    ranks.all("setup", model=str(models[name]), trainer=trainer)
    assert ranks.all("train_beside_one_whole_step", count=5) == [[[]] * 5] * len(ranks.processes)


def test_an_engine_between_two_steps_refuses_all_but_a_saved_state(
    ranks: Ranks, models: dict[str, Path], tmp_path: Path
) -> None:
    ranks.all("setup", model=str(models["qwen3-untied"]), trainer=TRAINER)
    ranks.all("save", directory=str(tmp_path / "state"))
    expected = gathered(ranks, tmp_path / "expected")
    for report in ranks.all("fence", fail_at=2):
        assert 0 < len(report["changed"]) < len(report["published"])
        assert (report["error"], report["step"]) == ("the fence failed.", 0)
    for do, arguments in {
        "train": {"first": 0, "count": 1},
        "shards": {"file": str(tmp_path / "torn")},
        "save": {"directory": str(tmp_path / "torn")},
        "export": {"directory": str(tmp_path / "torn")},
    }.items():
        for rank in range(len(ranks.processes)):
            ranks.tell(rank, do, **arguments)
        for rank in range(len(ranks.processes)):
            assert "some parameters had changed" in ranks.answer(rank)["message"]
    ranks.all("load", directory=str(tmp_path / "state"))
    assert_same(gathered(ranks, tmp_path / "loaded"), expected)
    ranks.all("train", first=0, count=1)


def test_a_rank_that_never_comes_and_a_taken_port_are_typed_errors(models: dict[str, Path]) -> None:
    with Ranks(2, timeout_s=2.0, present=1) as ranks:
        ranks.tell(0, "setup", model=str(models["qwen3-tied"]))
        answer = ranks.answer(0, START_S)
        assert answer["error"] == "DeadlineExceededError"
        assert "trainer.collective_timeout_s" in answer["message"]
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            holder.listen()
            engine = Fsdp2Engine(TrainerConfig(device="cpu"), 0, 1, ("127.0.0.1", holder.getsockname()[1]))
            with pytest.raises(OSError, match="taken") as taken:
                engine.setup(models["qwen3-tied"], seed=0)
            assert type(taken.value).__name__ == "AddressInUseError"
            engine.close()


def test_a_connection_that_gloo_loses_when_the_ranks_join_is_made_again(models: dict[str, Path]) -> None:
    with Ranks(2, timeout_s=24.0) as ranks:
        ranks.all("draw")  # both have imported what they need
        ranks.tell(1, "lose_first_connection")
        assert ranks.answer(1) == {"ok": None}
        ranks.all("setup", model=str(models["qwen3-tied"]), trainer={"fsdp2": {"tensor_parallel": 2}})
        ranks.all("train", first=0, count=1)
        assert ranks.all("group_timeouts") == [[24.0] * 3] * 2


def test_no_group_of_ranks_waits_longer_than_it_is_allowed_to(
    models: dict[str, Path], ranks_of: Callable[[int], Ranks]
) -> None:
    ranks = ranks_of(4)
    ranks.all("setup", model=str(models["qwen3-tied"]), trainer={"fsdp2": {"tensor_parallel": 2}})
    assert ranks.all("group_timeouts") == [[COLLECTIVE_S] * 3] * 4
