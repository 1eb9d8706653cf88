"""Two FSDP2 ranks whose cuts divide blocks: what a rollout restores is what the reference leaves of the exported weights."""

from __future__ import annotations

import asyncio
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from publishing import PlainReplica
from tiny_models import Quantise, add_tokenizer, left_of, load_tensors, make_qwen3
from trainer_ranks import Trainers

from weightlane.sync import Expectation, ExpectedTensor, Subscriber

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


class Copy(PlainReplica):
    """A replica that keeps what it takes."""

    def __init__(self, expectation: Expectation) -> None:
        super().__init__("rollout-0", self._keep)
        self._expectation = expectation

    async def connect(self, address: dict[str, Any], backend: str, options: dict[str, Any]) -> None:
        self.subscriber = Subscriber("rollout-0/0", address, backend, options, self._expectation)

    def _keep(self, version: int) -> None:
        self.weights = {name: tensor.clone() for name, tensor in self.subscriber.take(version).items()}
        self.subscriber.release(version)


def test_fsdp2_ranks_quantise_what_they_hold(tmp_path: Path) -> None:
    model = make_qwen3(tmp_path / "model", seed=3, vocab=300)
    add_tokenizer(model, 300)
    any_float32 = {
        name: ExpectedTensor(tuple(tensor.shape), frozenset({torch.float32}))
        for name, tensor in load_tensors(model).items()
    }

    async def publish(trainers: Trainers, version: int, scheme: Quantise) -> None:
        replica = Copy(Expectation(any_float32))
        async with trainers.publishing([replica], "shm", quantise=scheme) as coordinator:
            trainers.call("train", version)
            trainers.call("export", str(tmp_path / scheme))
            trainers.call("publish", version)
            await coordinator.sync(version)
            for name, wanted in left_of(load_tensors(tmp_path / scheme), scheme).items():
                assert torch.equal(replica.weights[name], wanted), name
        replica.subscriber.close()

    with closing(Trainers(2)) as trainers:
        trainers.call("setup", str(model))
        asyncio.run(publish(trainers, 1, "fp8"))
        asyncio.run(publish(trainers, 2, "int8"))
