"""Adapters of several ranks on one model, as PEFT's files, merged, and padded as they travel; and a replica for them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from publishing import OneRankTrainer
from running_worker import RecordingWorker, probed_worker, started
from safetensors.torch import save_file
from tiny_models import add_tokenizer, copy_with, load_tensors, make_qwen3
from waiting import HANG_S

from weightlane.rollout.config import AdapterConfig

T = TypeVar("T")
VOCAB = 300
RANK = 8
"""The rank that travels."""
ALL = ("down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj")
PREFIX = "base_model.model."


@dataclass
class Adapter:
    """Random A and B by PEFT's names."""

    config: AdapterConfig
    tensors: dict[str, torch.Tensor]
    files: Path
    merged: Path

    def padded(self, like: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Zeros as `like`, with this adapter in their first rows or columns."""
        travels = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        for name, tensor in self.tensors.items():
            travels[name][: tensor.shape[0], : tensor.shape[1]] = tensor
        return travels


def make_adapter(model: Path, path: Path, seed: int, rank: int, alpha: float, targets: Sequence[str] = ()) -> Adapter:
    config = AdapterConfig(rank=rank, alpha=alpha, targets=tuple(targets))
    weights = load_tensors(model)
    numbers = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in sorted(weights):
        layer = name.removesuffix(".weight")
        if layer.rpartition(".")[2] in (targets or ALL):
            rows, columns = weights[name].shape
            a = 0.2 * torch.randn(rank, columns, generator=numbers)
            b = 0.2 * torch.randn(rows, rank, generator=numbers)
            tensors |= {f"{PREFIX}{layer}.lora_A.weight": a, f"{PREFIX}{layer}.lora_B.weight": b}
            weights[name] = (weights[name].double() + alpha / rank * b.double() @ a.double()).float()
    files = path / "peft"
    files.mkdir(parents=True)
    save_file(tensors, files / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets or ALL)}
    (files / "adapter_config.json").write_text(json.dumps(described))
    return Adapter(config, tensors, files, copy_with(weights, model, path / "merged"))


@dataclass
class NamedAdapters:
    """A running replica with adapters that requests name, and the trainer that publishes them."""

    runner: asyncio.Runner
    worker: RecordingWorker
    model: Path
    folder: Path
    trainer: OneRankTrainer = field(init=False)
    made: list[Adapter] = field(default_factory=list)

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(call, HANG_S))

    def make(self, rank: int, alpha: float, targets: Sequence[str] = ()) -> Adapter:
        seed = len(self.made)
        self.made.append(make_adapter(self.model, self.folder / str(seed), seed, rank, alpha, targets))
        return self.made[-1]

    async def publish(self, adapter: Adapter, keep: Sequence[int] = (), announced: AdapterConfig | None = None) -> int:
        """Carry an adapter to the replica; returns its version."""
        for name, tensor in adapter.padded(self.trainer.live).items():
            self.trainer.live[name].copy_(tensor)
        await self.worker.announce(self.trainer.version + 1, announced or adapter.config, keep)
        await self.trainer.sync_live()
        return self.trainer.version

    async def probe(self, method: str, *arguments: object) -> list[Any]:
        answers: list[Any] = await self.worker._engine.running.collective_rpc(method, args=arguments)
        return answers

    async def slot(self, version: int) -> list[Any]:
        found = self.worker._adapters.of_request(version)
        assert found is not None
        return await self.probe("probe_slot", found.id)


@contextmanager
def serving(folder: Path, slots: int) -> Iterator[NamedAdapters]:
    """A replica of one rank that is connected and has no version yet."""
    model = make_qwen3(folder / "model", seed=3, vocab=VOCAB)
    add_tokenizer(model, VOCAB)
    adapter = {"rank": RANK, "alpha": 1.0}
    worker = probed_worker("rollout-0", model, in_engine=True, adapter=adapter, adapter_slots=slots, dtype="float32")
    with started(worker) as runner:
        made = NamedAdapters(runner, worker, model, folder)
        zeros = make_adapter(model, folder / "zeros", 0, RANK, 1.0).tensors
        made.trainer = OneRankTrainer({name: torch.zeros_like(tensor) for name, tensor in zeros.items()})
        with closing(made.trainer):
            made.run(worker.connect(made.trainer.address, "shm"))
            made.run(made.trainer.connect([worker], retries=0))
            yield made
