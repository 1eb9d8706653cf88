"""Adapters of several ranks on one model, as PEFT's files, merged, and padded as they are sent; and a replica for them."""

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
from running_replica import RecordingReplica, probed_replica, started
from safetensors.torch import save_file
from tiny_models import add_tokenizer, copy_with, load_tensors, make_qwen3
from waiting import HANG_S

from weightlane.rollout.config import AdapterConfig

T = TypeVar("T")
VOCAB = 300
RANK, ALPHA = 8, 12.0
"""The rank that is sent, and the scale of versions that nobody announces."""
SLOTS = 3
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
        padded = {name: torch.zeros_like(tensor) for name, tensor in like.items()}
        for name, tensor in self.tensors.items():
            padded[name][: tensor.shape[0], : tensor.shape[1]] = tensor
        return padded


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
    """A running replica of two ranks with adapters that requests name, and a trainer that publishes them."""

    runner: asyncio.Runner
    local: RecordingReplica
    model: Path
    folder: Path
    made: list[Adapter] = field(default_factory=list)

    def __post_init__(self) -> None:
        zeros = make_adapter(self.model, self.folder / "zeros", 0, RANK, 1.0).tensors
        self.trainer = OneRankTrainer({name: torch.zeros_like(tensor) for name, tensor in zeros.items()})
        self.run(self.local.connect(self.trainer.address, "shm"))
        self.run(self.trainer.connect([self.local], retries=0))

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(asyncio.wait_for(call, HANG_S))

    def close(self) -> None:
        """End the trainer."""
        self.trainer.close()

    def make(self, rank: int, alpha: float, targets: Sequence[str] = ()) -> Adapter:
        seed = len(self.made)
        self.made.append(make_adapter(self.model, self.folder / str(seed), seed, rank, alpha, targets))
        return self.made[-1]

    async def publish(self, adapter: Adapter, keep: Sequence[int] = (), announced: AdapterConfig | None = None) -> int:
        """Carry an adapter to the replica; returns its version."""
        for name, tensor in adapter.padded(self.trainer.live).items():
            self.trainer.live[name].copy_(tensor)
        await self.local.announce(self.trainer.version + 1, announced or adapter.config, keep)
        await self.trainer.sync_live()
        return self.trainer.version

    async def probe(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of `ProbeExtension` on every rank."""
        answers: list[Any] = await self.local._engine.running.collective_rpc(method, args=arguments)
        return answers

    async def loaded(self) -> list[int]:
        """The adapters that every rank has."""
        one, other = await self.probe("probe_adapters")
        assert one == other
        return list(one)

    async def check_slot(self, files: Path, version: int | None = None) -> None:
        """A version, or the newest one, is in its slots bit for bit what vLLM loads from PEFT's files."""
        found = self.local._adapters.of_request(version)
        assert found is not None
        held = await self.probe("probe_slot", found.id)
        assert held == await self.probe("probe_slot_of_files", str(files))
        assert any(bytes.fromhex(str(raw)).strip(b"\0") for rank in held for _, _, raw in rank.values())


@contextmanager
def serving(folder: Path) -> Iterator[NamedAdapters]:
    """A replica that is connected and has no version yet."""
    model = make_qwen3(folder / "model", seed=3, vocab=VOCAB)
    add_tokenizer(model, VOCAB)
    worker = probed_replica(
        "rollout-0",
        model,
        tensor_parallel=2,
        adapter={"rank": RANK, "alpha": ALPHA},
        adapter_slots=SLOTS,
        dtype="float32",
    )
    with started(worker) as runner, closing(NamedAdapters(runner, worker, model, folder)) as made:
        yield made
