"""Trainer ranks of the megatron engine as Ray actors: load, train, save, export, resume. The e2e tests do so with fsdp2."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_ranks import TRAINER, assert_same, checkpoint
from engine_worker import make_batch

from weightlane.trainer.config import AlgorithmConfig, MegatronConfig, TrainerConfig

pytestmark = [pytest.mark.ray, pytest.mark.megatron, pytest.mark.slow]


def test_megatron_ranks_in_ray_train_and_go_on_from_a_saved_state(
    local_ray: None, models: dict[str, Path], tmp_path: Path
) -> None:
    from weightlane.trainer.ray_group import TrainerGroup

    layout = MegatronConfig(tensor_parallel=2)
    config = TrainerConfig(engine="megatron", ranks=2, device="cpu", call_timeout_s=180.0, megatron=layout, **TRAINER)

    async def train(first: int, count: int, state: Path | None, out: Path) -> None:
        group = TrainerGroup.place(config, AlgorithmConfig())
        try:
            assert await group.start(models["qwen3-tied"], 0, "127.0.0.1", state) == first
            for step in range(first, first + count):
                report = await group.train_step(make_batch(step, 6, 61))
                assert report.step == step + 1
                assert report.grad_norm > 0.0
                if step == 0:
                    await group.save(tmp_path / "state")
            await group.export_hf(out)
        finally:
            await group.close()

    asyncio.run(train(0, 3, None, tmp_path / "whole"))
    asyncio.run(train(1, 2, tmp_path / "state", tmp_path / "resumed"))
    assert_same(checkpoint(tmp_path / "whole"), checkpoint(tmp_path / "resumed"))
