"""Roles with adapters on the ranks of a team, for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_ranks import FSDP2_TP2, TRAINER, Teams, exhaustive, megatron
from safetensors.torch import load_file
from team_ranks import TeamRanks
from waiting import HANG_S

from weightlane.trainer.config import AlgorithmConfig, LoraConfig, TrainerConfig
from weightlane.trainer.dispatch.dispatch import Role, WorkerDispatch
from weightlane.trainer.dispatch.role import RoleSpec
from weightlane.trainer.objectives.named import Objective

MODEL = "qwen3-tied"
CARRIER = LoraConfig(rank=5, publish="adapter")
CONFIGS = {
    "a": LoraConfig(rank=3, alpha=6, seed=1, targets=("q_proj", "o_proj", "up_proj", "down_proj")),
    "b": LoraConfig(rank=2, targets=("k_proj", "gate_proj", "down_proj")),
}
LAYOUTS = [
    pytest.param({}, id="fsdp2-2"),
    exhaustive(FSDP2_TP2, id="fsdp2-tp2"),
    pytest.param(
        megatron({"tensor_parallel": 2}), id="megatron-tp2", marks=(pytest.mark.megatron, pytest.mark.exhaustive)
    ),
]
"""Settings of two ranks."""


@asynccontextmanager
async def opened(teams: Teams, **trainer: Any) -> AsyncIterator[Role]:
    """A role on a team of two ranks, by default with a model that is not trained itself."""
    model = teams.models[MODEL]
    settings = {"frozen": True, "micro_batch_tokens": 40, **TRAINER, **trainer}
    config = TrainerConfig(device="cpu", ranks=2, collective_timeout_s=HANG_S, **settings)
    spec = RoleSpec("policy", config, model, {"loss": Objective(AlgorithmConfig())})
    dispatch = WorkerDispatch([spec], {"trainer": TeamRanks(teams.of(2), model)})
    try:
        await dispatch.start()
        yield dispatch["policy"]
    finally:
        await dispatch.close()


def run(use: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    async def in_time() -> Any:
        async with asyncio.timeout(HANG_S):
            return await use()

    return asyncio.run(in_time())


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    """Everything that was written about an adapter, moments included."""
    found = {}
    for path in directory.glob("*.safetensors"):
        found |= {f"{path.stem}|{key}": tensor for key, tensor in load_file(path).items()}
    return found


async def written(role: Role, adapter: str, directory: Path) -> dict[str, torch.Tensor]:
    await role.export_adapter(directory, adapter, with_optimizer=True)
    return tensors_of(directory)
