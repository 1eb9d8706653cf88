"""Trainer ranks of the megatron engine as Ray actors. The e2e tests run fsdp2 so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from engine_ranks import TRAINER, Ranks, assert_same, gathered
from engine_worker import make_batch

from weightlane.trainer.config import AlgorithmConfig, MegatronConfig, TrainerConfig

pytestmark = [pytest.mark.ray, pytest.mark.megatron, pytest.mark.slow]


def test_megatron_ranks_in_ray_train_and_save_as_plain_processes_do(
    local_ray: None, ranks_of: Callable[[int], Ranks], models: dict[str, Path], tmp_path: Path
) -> None:
    from weightlane.trainer.ray_group import TrainerGroup

    layout = MegatronConfig(tensor_parallel=2)
    config = TrainerConfig(engine="megatron", ranks=2, device="cpu", call_timeout_s=180.0, megatron=layout, **TRAINER)

    async def train() -> None:
        group = TrainerGroup.place(config, AlgorithmConfig())
        try:
            assert await group.start(models["qwen3-tied"], 0, "127.0.0.1", None) == 0
            for step in range(2):
                report = await group.train_step(make_batch(step, 6, 61))
                assert report.step == step + 1
                assert report.grad_norm > 0.0
            await group.save(tmp_path / "state")
        finally:
            await group.close()

    asyncio.run(train())
    ranks, trainer = ranks_of(2), {**TRAINER, "engine": "megatron", "megatron": {"tensor_parallel": 2}}
    ranks.all("setup", model=str(models["qwen3-tied"]), trainer=trainer)
    ranks.all("train", first=0, count=2)
    trained = gathered(ranks, tmp_path / "trained")
    ranks.all("setup", model=str(models["qwen3-tied"]), trainer=trainer)
    ranks.all("load", directory=str(tmp_path / "state"))
    assert_same(gathered(ranks, tmp_path / "loaded"), trained)
