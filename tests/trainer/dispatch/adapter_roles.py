"""Roles with adapters on the ranks of a team, and the replicas to which they publish, for the tests of this folder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import torch
from engine_ranks import FSDP2_CP2, FSDP2_TP2, TRAINER, Teams, case, exhaustive, megatron
from safetensors.torch import load_file
from team_ranks import TeamRanks
from waiting import HANG_S

from weightlane.ckpt_engines import WeightlaneError
from weightlane.sync import (
    CheckpointEngineConfig,
    CommitReport,
    Coordinator,
    Expectation,
    ExpectedTensor,
    Rendezvous,
    Subscriber,
    SyncConfig,
)
from weightlane.trainer.config import LoraConfig, TrainerConfig
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.role import Role
from weightlane.trainer.dispatch.role_spec import RoleSpec
from weightlane.trainer.objectives.config import AlgorithmConfig
from weightlane.trainer.objectives.named import Objective

MODEL = "qwen3-tied"
CARRIER = LoraConfig(rank=5, publish="adapter")
CONFIGS = {
    "a": LoraConfig(rank=3, alpha=6, seed=1, targets=("q_proj", "o_proj", "up_proj", "down_proj")),
    "b": LoraConfig(rank=2, targets=("k_proj", "gate_proj", "down_proj")),
}
LAYOUTS = [
    case({}, id="fsdp2-2"),
    exhaustive(FSDP2_TP2, id="fsdp2-tp2"),
    exhaustive(FSDP2_CP2, id="fsdp2-cp2"),
    exhaustive(megatron({"tensor_parallel": 2}), id="megatron-tp2"),
]
"""Settings of two ranks."""


@asynccontextmanager
async def opened(teams: Teams, **trainer: Any) -> AsyncIterator[Role]:
    """A role on a team of two ranks, by default with a model that is not trained itself."""
    model = teams.models[MODEL]
    settings = {"frozen": True, "micro_batch_tokens": 40, **TRAINER, **trainer}
    config = TrainerConfig(device="cpu", ranks=2, collective_timeout_s=HANG_S, **settings)
    spec = RoleSpec("policy", config, model, {"loss": Objective(AlgorithmConfig())})
    dispatch = WorkerDispatch([spec], {"trainer": TeamRanks(teams.of(2))})
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


class Keeper:
    """A replica of one rank."""

    name = "rollout-0"

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber
        self.versions: dict[int, dict[str, torch.Tensor]] = {}

    def subscriber_names(self) -> list[str]:
        return [f"{self.name}/0"]

    async def commit(self, version: int) -> CommitReport:
        await asyncio.to_thread(self._take, version)
        return CommitReport(version, blocked_s=0.0)

    def _take(self, version: int) -> None:
        self.versions[version] = {name: each.clone() for name, each in self._subscriber.take(version).items()}
        self._subscriber.release(version)

    async def rollback(self, version: int) -> None:
        raise AssertionError("no version is given up")

    async def quarantine(self, error: WeightlaneError) -> None:
        raise error


@asynccontextmanager
async def publishing(role: Role, tensors: Mapping[str, torch.Tensor]) -> AsyncIterator[tuple[Coordinator, Keeper]]:
    """Connect a role's ranks to a replica that expects tensors like these, in float32."""
    rendezvous = Rendezvous.host()
    address, sync = rendezvous.address.to_plain(), SyncConfig(deadline_s=HANG_S, quorum=1.0, bucket_mib=0.01)
    await role.connect(address, CheckpointEngineConfig(backend="shm"), sync, torch.float32)
    expected = {
        name: ExpectedTensor(tuple(tensor.shape), frozenset({torch.float32})) for name, tensor in tensors.items()
    }
    with closing(Subscriber("rollout-0/0", address, "shm", {}, Expectation(expected))) as subscriber:
        keeper = Keeper(subscriber)
        with closing(Coordinator(rendezvous, role.publisher_names(), [keeper], sync)) as coordinator:
            await coordinator.connect()
            yield coordinator, keeper
