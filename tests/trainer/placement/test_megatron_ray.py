"""Trainer ranks of the megatron engine as Ray actors. `make test` runs fsdp2 so, in tests/e2e."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_batches import make_batch
from engine_ranks import TRAINER, Teams, assert_same, gathered, megatron
from waiting import HANG_S

from weightlane.trainer.config import AlgorithmConfig, MegatronConfig, TrainerConfig
from weightlane.trainer.objectives.named import Objective

pytestmark = [pytest.mark.ray, pytest.mark.megatron, pytest.mark.slow, pytest.mark.exhaustive]


def test_megatron_ranks_in_ray_train_and_save_as_plain_processes_do(
    local_ray: None, teams: Teams, tmp_path: Path
) -> None:
    from weightlane.trainer.placement.ray_group import TrainerGroup

    layout = MegatronConfig(tensor_parallel=2)
    patience = {"call_timeout_s": HANG_S, "collective_timeout_s": HANG_S}
    config = TrainerConfig(engine="megatron", ranks=2, device="cpu", megatron=layout, **patience, **TRAINER)

    async def train() -> None:
        group = TrainerGroup.place(config, Objective(AlgorithmConfig()))
        try:
            assert await group.start(teams.models["qwen3-tied"], 0, "127.0.0.1", None) == 0
            for step in range(2):
                report = await group.train_step(make_batch(step))
                assert report.step == step + 1
                assert report.grad_norm > 0.0
            await group.save(tmp_path / "state")
        finally:
            await group.close()

    asyncio.run(train())
    ranks = teams.of(2)
    ranks.setup("qwen3-tied", **megatron({"tensor_parallel": 2}))
    ranks.all("train", first=0, count=2)
    trained = gathered(ranks)
    ranks.setup("qwen3-tied", **megatron({"tensor_parallel": 2}))
    ranks.all("load", directory=tmp_path / "state")
    assert_same(gathered(ranks), trained)
