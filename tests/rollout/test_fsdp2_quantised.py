"""Two FSDP2 ranks whose cuts divide blocks: what a rollout restores is what the reference leaves of the exported weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from quantised_reference import restored
from tiny_models import add_tokenizer, load_tensors, make_qwen3
from trainer_ranks import Trainers
from waiting import HANG_S

from weightlane.sync import CommitReport, Coordinator, Expectation, ExpectedTensor, Rendezvous, Subscriber, SyncConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


class Copy:
    """A replica that keeps what it takes."""

    name = "rollout-0"
    weights: dict[str, torch.Tensor]

    def __init__(self, subscriber: Subscriber) -> None:
        self._subscriber = subscriber

    def subscriber_names(self) -> list[str]:
        return ["rollout-0/0"]

    async def commit(self, version: int) -> CommitReport:
        self.weights = {name: tensor.clone() for name, tensor in self._subscriber.take(version).items()}
        self._subscriber.release(version)
        return CommitReport(version, blocked_s=0.0)

    async def rollback(self, version: int) -> None:
        raise AssertionError("every version is taken")

    async def quarantine(self, error: Exception) -> None:
        raise error


def test_fsdp2_ranks_quantise_what_they_hold(tmp_path: Path) -> None:
    model = make_qwen3(tmp_path / "model", seed=3, vocab=300)
    add_tokenizer(model, 300)
    trainers = Trainers(2)
    trainers.call("setup", str(model))
    placements = trainers.call("placement", "float32")
    expectation = Expectation(
        {name: ExpectedTensor(tuple(shape), frozenset({torch.float32})) for name, shape, *_ in placements[0]}
    )
    for number, scheme in enumerate(("fp8", "int8"), 1):
        rendezvous = Rendezvous.host()
        address = rendezvous.address.to_plain()
        trainers.call("connect", address, "shm", {}, "float32", placements, scheme)
        subscriber = Subscriber("rollout-0/0", address, "shm", {}, expectation)
        replica = Copy(subscriber)
        coordinator = Coordinator(rendezvous, trainers.names, [replica], SyncConfig(deadline_s=HANG_S))
        trainers.call("train", number)
        trainers.call("export", str(tmp_path / scheme))
        trainers.call("publish", number)
        asyncio.run(coordinator.sync(number))
        for name, tensor in load_tensors(tmp_path / scheme).items():
            wanted = restored(tensor, scheme) if "_proj." in name else tensor
            assert torch.equal(replica.weights[name], wanted), name
        coordinator.close()
        subscriber.close()
    trainers.close()
