"""Trainer ranks of the megatron engine as Ray actors. `make test` runs fsdp2 so, in tests/e2e."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from engine_batches import make_batch
from engine_ranks import TRAINER, Teams, assert_same, gathered, megatron
from waiting import HANG_S

from weightlane.trainer.algorithms.policy_gradient import PolicyGradient
from weightlane.trainer.algorithms.roles import OBJECTIVE, POLICY
from weightlane.trainer.config import AlgorithmConfig, MegatronConfig, TrainerConfig
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.role import RoleSpec
from weightlane.trainer.objectives.named import Objective

pytestmark = [pytest.mark.ray, pytest.mark.megatron, pytest.mark.slow, pytest.mark.exhaustive]


def test_megatron_ranks_in_ray_train_and_save_as_plain_processes_do(
    local_ray: None, teams: Teams, tmp_path: Path
) -> None:
    from weightlane.trainer.dispatch.ray_ranks import RayRanks

    layout = MegatronConfig(tensor_parallel=2)
    patience = {"call_timeout_s": HANG_S, "collective_timeout_s": HANG_S}
    config = TrainerConfig(engine="megatron", ranks=2, device="cpu", megatron=layout, **patience, **TRAINER)

    async def train() -> None:
        spec = RoleSpec(POLICY, config, teams.models["qwen3-tied"], {OBJECTIVE: Objective(AlgorithmConfig())})
        dispatch = WorkerDispatch([spec], {spec.group: RayRanks(config, "127.0.0.1")})
        try:
            assert await dispatch.start() == {POLICY: 0}
            trainers = PolicyGradient(dispatch)
            for step in range(2):
                report = await trainers.train_step(make_batch(step))
                assert report.step == step + 1
                assert report.grad_norm > 0.0
            await trainers.save(tmp_path / "state")
        finally:
            await dispatch.close()

    asyncio.run(train())
    ranks = teams.of(2)
    ranks.setup("qwen3-tied", **megatron({"tensor_parallel": 2}))
    ranks.all("train", first=0, count=2)
    trained = gathered(ranks)
    ranks.setup("qwen3-tied", **megatron({"tensor_parallel": 2}))
    ranks.all("load", directory=tmp_path / "state")
    assert_same(gathered(ranks), trained)
